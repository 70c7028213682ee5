"""Standing gloo ranks for tests: started once, used by every multi-rank test of the session.

Start-up (importing torch and Megatron-Core) costs several seconds a process, a test case a fraction of one. So one
process imports them and ranks are forked from it; they stay, and each case only makes a new process group; the cases of
a `session` share even that. A case that fails or overruns its time ends all ranks; the next case starts fresh ones.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

# Seconds, on a machine that is busy otherwise: for all ranks to import what they need, and for a case.
START, LIMIT = 300, 180.0


class RankFailure(AssertionError):
    """A rank raised; the message holds its traceback."""


class RankTimeout(AssertionError):
    """Not every rank answered in time."""


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = LIMIT) -> list[Any]:
    """Runs `fn(*args)` on ranks 0 .. world_size-1 with torch.distributed initialised, and returns their results.

    Args:
        world_size: number of ranks.
        fn: an importable top-level function; it reads its rank from torch.distributed.
        args: picklable arguments, the same for every rank. A tensor travels by value.
        timeout: seconds for the case, start-up of missing processes not counted.

    Raises:
        RankFailure: the first rank's traceback when one raised.
        RankTimeout: when ranks hang; it names those that did not answer.
    """
    with _POOL.session(world_size) as run:
        return run(fn, *args, timeout=timeout)


class Pool:
    """A set of ranks of its own; `run_ranks` uses one that all tests share."""

    def __init__(self) -> None:
        self.workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        atexit.register(self.end)

    @contextmanager
    def session(self, size: int) -> Iterator[Callable[..., list[Any]]]:
        """`run(fn, *args, timeout=LIMIT)` as `run_ranks`, with one default process group for all calls of the session.

        What `fn` keeps in a module's globals (a built model, say) is there in the next call.
        """
        self.ensure(size)
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            store = os.path.join(folder, "store")

            def run(fn: Callable[..., Any], *args: Any, timeout: float = LIMIT) -> list[Any]:
                return self._run(size, store, fn, args, timeout)

            try:
                yield run
            except BaseException:
                self.end()  # what the session left in the ranks would disturb the next one
                raise
            if self.workers:
                self._run(size, store, None, (), LIMIT)

    def ensure(self, size: int) -> None:
        """Starts what is missing and waits until all have imported torch and Megatron-Core."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.dist.preloaded"])
        fresh = []
        while len(self.workers) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=False)
            process.start()
            theirs.close()
            self.workers.append((process, ours))
            fresh.append(ours)
        for connection in fresh:
            if not connection.poll(START):
                self.end()
                raise RankTimeout(f"ranks did not start within {START} s")
            connection.recv()

    def _run(
        self, size: int, store: str, fn: Callable[..., Any] | None, args: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        if not self.workers:
            raise RankFailure("the ranks of this session have ended")
        for rank in range(size):
            self.workers[rank][1].send((rank, size, store, fn, args))
        return self._collect(size, timeout)

    def _collect(self, size: int, timeout: float) -> list[Any]:
        pending = {self.workers[rank][1]: rank for rank in range(size)}
        results: list[Any] = [None] * size
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(pending.values())
                self.end()
                raise RankTimeout(f"ranks {missing} of {size} did not finish within {timeout} s")
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[arg-type]
                try:
                    ok, value = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    ok, value = False, "the process ended without an answer"
                if not ok:
                    self.end()
                    raise RankFailure(f"rank {rank} of {size} failed:\n{value}")
                results[rank] = value
        return results

    def end(self) -> None:
        """Kills every rank, and what it has started (Megatron-Core's writer of checkpoints keeps a server)."""
        for process, connection in self.workers:
            assert process.pid is not None
            with suppress(ProcessLookupError):  # it has ended, or has not yet become the leader of its group
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            connection.close()
        for process, _ in self.workers:
            process.join(10)
        self.workers = []


def _serve(connection: Connection) -> None:
    """Main loop of a rank."""
    os.setpgrp()
    faulthandler.enable()  # a rank that crashes says where
    from tests.dist.preloaded import dist

    connection.send("ready")
    while True:
        try:
            rank, size, store, fn, args = connection.recv()
        except EOFError:
            return
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        try:
            if not dist.is_initialized():
                dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
            value = fn(*args) if fn is not None else None
            dist.barrier()
            if fn is None:
                dist.destroy_process_group()
                gc.collect()  # models and groups hold each other; the threads of a group end with it
                gc.freeze()  # what is left are imports, which the next collection need not look through
            connection.send((True, value))
        except BaseException:  # whatever a case raises belongs to the test
            connection.send((False, traceback.format_exc()))


def shared_pool() -> Pool:
    """The pool of `run_ranks`, for sessions."""
    return _POOL


_POOL = Pool()
