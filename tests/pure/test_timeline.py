"""Phases of a trace of a GPU: the times of their kernels, whichever thread launched them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flagscale.train.timeline import MARK, Span, read_trace


def annotation(name: str, start: float, length: float) -> dict[str, Any]:
    """A phase as the host saw it; thread 1."""
    return {"name": MARK + name, "cat": "user_annotation", "tid": 1, "ts": start, "dur": length}


def launch(at: float, correlation: int, thread: int = 1, *, kernels: list[tuple[float, float, int]]) -> list[Any]:
    """A launch and its kernels, each (start, length, stream)."""
    runtime = {"cat": "cuda_runtime", "tid": thread, "ts": at, "dur": 1, "args": {"correlation": correlation}}
    return [
        runtime | {"name": "cudaLaunchKernel"},
        *(
            {"cat": "kernel", "name": "k", "ts": start, "dur": length,
             "args": {"correlation": correlation, "stream": stream}}
            for start, length, stream in kernels
        ),
    ]  # fmt: skip


def test_kernels_count_whoever_launched_them(tmp_path: Path) -> None:
    """A graph's kernels share one launch; autograd's thread launches the backward pass, and on another stream a
    reduction that is still running long after it."""
    events = [
        annotation("language", 0, 10), annotation("vision_backward", 20, 10), annotation("reduce", 40, 1),
        # The profiler's own view of the GPU, without what other threads launched: not used.
        annotation("vision_backward", 500, 1) | {"cat": "gpu_user_annotation"},
        *launch(5, 1, kernels=[(100, 10, 7), (110, 90, 7)]),
        *launch(21, 2, thread=2, kernels=[(200, 50, 7)]),
        *launch(23, 3, thread=2, kernels=[(250, 30, 7)]),
        *launch(25, 4, thread=2, kernels=[(260, 400, 9)]),
    ]  # fmt: skip
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": 2_000_000_000, "traceEvents": events}))
    found = read_trace(path)
    expected = [("language", 100, 100), ("vision_backward", 200, 80)]  # a phase without kernels has no time
    assert found == [
        Span(phase=phase, start=pytest.approx(2 + start / 1e6), length=pytest.approx(length / 1e6))
        for phase, start, length in expected
    ]
