"""How long the phases of an iteration take, on a GPU without making the host wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

from flagscale.train.timeline import MARK

BETWEEN = "data"
"""What is done between the phases of a step: waiting for samples."""


class PhaseClock:
    """Adds up the seconds spent in each phase.

    On a GPU a phase lasts from the end of the work queued before it to the end of its own, read from events once they
    have passed; a phase that is still running when `seconds` is asked for counts to the next answer. On a CPU it is
    the host's time.

    Args:
        device: where the phases run.
        enter: is told the name of a phase when it begins, and `BETWEEN` when it has ended.
    """

    def __init__(self, device: torch.device, enter: Callable[[str], None]) -> None:
        self._on_gpu = device.type == "cuda"
        self._enter = enter
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: dict[str, float] = {}
        self._host_seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times its body, and names it in traces."""
        self._enter(name)
        began = time.perf_counter()
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            with record_function(MARK + name):
                yield
            end.record()
            self._pending.append((name, start, end))
            self._host_seconds[name] = self._host_seconds.get(name, 0.0) + time.perf_counter() - began
        else:
            with record_function(MARK + name):
                yield
            self._add(name, time.perf_counter() - began)
        self._enter(BETWEEN)  # not after an error, which is the phase's

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        while self._pending and self._pending[0][2].query():
            name, start, end = self._pending.pop(0)
            self._add(name, start.elapsed_time(end) / 1e3)
        taken, self._seconds = self._seconds, {}
        return taken

    def host_seconds(self) -> dict[str, float]:
        """Seconds the host spent in each phase since the last call, on a GPU: launching, and waiting where launches may
        run no further ahead; empty on a CPU."""
        taken, self._host_seconds = self._host_seconds, {}
        return taken

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
