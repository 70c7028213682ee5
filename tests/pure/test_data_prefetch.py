"""Reading ahead: as far as asked and no further, in order, with the reader's errors as themselves, ended at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from flagscale.data.prefetch import Prefetcher


def until(condition: Callable[[], bool]) -> None:
    """Wait for something another thread does; an assertion when it does not come."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.002)


def counting(made: list[int], count: int = 100) -> Iterator[int]:
    for number in range(count):
        made.append(number)
        yield number


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_as_many_are_kept_ready_as_asked(depth: int) -> None:
    made: list[int] = []
    ahead = Prefetcher(counting(made), depth)
    for taken in range(4):
        until(lambda: len(made) == taken + depth)  # noqa: B023 called before the loop goes on
        time.sleep(0.05)
        assert len(made) == taken + depth, "more than was asked for"
        assert ahead.get() == taken
    ahead.close()


def test_all_come_in_order_and_then_the_end() -> None:
    ahead = Prefetcher(counting([], 20), 3)
    assert [ahead.get() for _ in range(20)] == list(range(20))
    for _ in range(2):
        with pytest.raises(StopIteration):
            ahead.get()
    ahead.close()


def test_an_error_comes_as_itself_after_what_was_read_before_it() -> None:
    def broken() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("here")

    ahead = Prefetcher(broken(), 8)
    until(lambda: not ahead._thread.is_alive())
    assert [ahead.get(), ahead.get()] == [1, 2]
    for _ in range(2):
        with pytest.raises(KeyError, match="here"):
            ahead.get()
    ahead.close()


def test_closing_ends_a_reader_that_waits_for_room_and_one_that_reads() -> None:
    full = Prefetcher(counting([]), 2)
    full.close()
    assert not full._thread.is_alive()
    go, begun = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        begun.set()
        go.wait(60)
        yield 1

    reading = Prefetcher(slow(), 2)
    begun.wait(60)
    threading.Timer(0.05, go.set).start()
    reading.close()
    assert not reading._thread.is_alive()
