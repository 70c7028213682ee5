"""A background thread that keeps the next results of an iterator ready."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Prefetcher[T]:
    """Runs `source` in a thread, at most `depth` finished results ahead of `get`.

    An exception of the source is raised, as itself, by the `get` after those that return the results before it.
    """

    def __init__(self, source: Iterator[T], depth: int) -> None:
        self._source = source
        self._depth = depth
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._has_room():
                result = next(self._source)
                with self._changed:
                    self._ready.append(result)
                    self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as error:  # handed to the thread that asks for the result
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until a result may be made; false when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
            return not self._closed

    def get(self) -> T:
        """The next result. Raises what the source raised; StopIteration when it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            if self._ready:
                result = self._ready.popleft()
                self._changed.notify_all()
                return result
        raise self._error or StopIteration

    def close(self) -> None:
        """End the thread; returns when it has finished the result it is at."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
