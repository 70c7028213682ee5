"""A picture of the phases of profiled iterations, a row a rank, drawn from the Chrome traces in a folder."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.config.errors import UserError

MARK = "phase: "
"""Starts the name of a phase among the trace's other annotations."""
PHASES = {
    "vision_forward": ("ViT forward", "tab:blue"),
    "exchange": ("exchange", "tab:orange"),
    "language": ("LLM microbatches", "tab:green"),
    "vision_backward": ("ViT backward", "tab:purple"),
    "reduce": ("gradient reduction", "tab:brown"),
    "optimizer": ("optimizer", "tab:red"),
}
MICROBATCH = "microbatch"
"""Forward of one microbatch, inside the phase `language`: a line where it starts."""
_ANNOTATION = "user_annotation"
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_ROWS_SHOWN = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One run of a phase: its name, start and length in seconds."""

    phase: str
    start: float
    length: float


def read_trace(path: Path) -> list[Span]:
    """The phases of a trace, by start. With kernels in it a phase lasts from the first to the last of those that were
    launched during it, not as long as the host was in it.

    Raises:
        UserError: when the file is no trace.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        # Times of the events are relative to it, and every rank may have another.
        events, base = trace["traceEvents"], trace.get("baseTimeNanoseconds", 0) / 1e9
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = type(error).__name__
        raise UserError(f"{path}: is no Chrome trace ({reason}); write one with experiment.profile") from error
    phases = [
        event
        for event in events
        if event.get("cat") == _ANNOTATION and "dur" in event and str(event.get("name", "")).startswith(MARK)
    ]
    times = _times_on_gpu(phases, events) or [(event["ts"], event["ts"] + event["dur"]) for event in phases]
    spans = [
        Span(phase=event["name"].removeprefix(MARK), start=base + time[0] / 1e6, length=(time[1] - time[0]) / 1e6)
        for event, time in zip(phases, times, strict=True)
        if time is not None
    ]
    return sorted(spans, key=lambda span: span.start)


def _times_on_gpu(phases: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[tuple[float, float] | None]:
    """(start, end) in us of each phase's kernels, None where it launched none; [] for a trace without kernels.

    The profiler's own annotations of the GPU miss what other threads launch, such as autograd's a backward pass.
    Of kernels on several streams those on the one with the most count: a reduction that a backward pass starts goes on
    beside the next phase.
    """
    kernels: dict[int, list[dict[str, Any]]] = {}  # by what ties them to their launch; a graph's share one
    for event in events:
        if event.get("cat") in _ON_GPU and (correlation := _correlation(event)) is not None:
            kernels.setdefault(correlation, []).append(event)
    if not kernels:
        return []
    launches = sorted(
        (event["ts"], _correlation(event))
        for event in events
        if event.get("cat") in _LAUNCHES and _correlation(event) in kernels
    )
    found: list[tuple[float, float] | None] = []
    for phase in phases:
        first = bisect_left(launches, (phase["ts"],))
        last = bisect_left(launches, (phase["ts"] + phase["dur"],))
        by_stream: dict[Any, list[dict[str, Any]]] = {}
        for _, correlation in launches[first:last]:
            for kernel in kernels[correlation]:
                by_stream.setdefault(kernel.get("args", {}).get("stream"), []).append(kernel)
        own = max(by_stream.values(), key=len, default=[])
        span = (min(k["ts"] for k in own), max(k["ts"] + k["dur"] for k in own)) if own else None
        found.append(span)
    return found


def _correlation(event: dict[str, Any]) -> int | None:
    """What a launch and its kernels share."""
    return event.get("args", {}).get("correlation")  # type: ignore[no-any-return]


def draw_timeline(folder: Path) -> Path:
    """Draw `timeline.png` from the folder's `rank<r>.json` and return its path.

    Raises:
        UserError: when there is no trace, or none with a phase.
    """
    return draw_timelines({"": folder}, folder / "timeline.png")


def draw_timelines(folders: Mapping[str, Path], target: Path) -> Path:
    """Draw several runs one above the other, at one scale, each from its first phase on.

    Args:
        folders: title -> folder with `rank<r>.json`.

    Raises:
        UserError: when a folder holds no trace, or none with a phase.
    """
    runs = {title: _read_folder(folder) for title, folder in folders.items()}
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    heights = [0.6 + 0.5 * len(spans) for spans in runs.values()]
    figure, axes = plt.subplots(
        len(runs), figsize=(12, 0.9 + sum(heights)), height_ratios=heights, sharex=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, (title, spans) in zip(axes[:, 0], runs.items(), strict=True):
        _draw_rows(axis, spans)
        axis.set_title(title, loc="left", fontsize="medium")
    axes[-1, 0].set_xlabel("time (ms); black lines: a microbatch of the language model starts")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for _, colour in PHASES.values()]
    figure.legend(handles, [name for name, _ in PHASES.values()], ncols=6, loc="outside upper center")
    figure.savefig(target, dpi=150)
    plt.close(figure)
    return target


def _read_folder(folder: Path) -> dict[int, list[Span]]:
    """Spans by rank, of the first ranks."""
    traces = {int(path.stem.removeprefix("rank")): path for path in folder.glob("rank*.json")}
    spans = {rank: read_trace(traces[rank]) for rank in sorted(traces)[:_ROWS_SHOWN]}
    if not any(spans.values()):
        raise UserError(f"{folder}: holds no trace with phases; write some with experiment.profile")
    return spans


def _draw_rows(axis: Any, spans: Mapping[int, list[Span]]) -> None:
    """A row a rank."""
    begin = min(span.start for row in spans.values() for span in row)
    for row, rank in enumerate(spans):
        for phase, (_, colour) in PHASES.items():
            bars = [(1e3 * (span.start - begin), 1e3 * span.length) for span in spans[rank] if span.phase == phase]
            axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
        starts = [1e3 * (span.start - begin) for span in spans[rank] if span.phase == MICROBATCH]
        axis.vlines(starts, row - 0.4, row + 0.4, colors="black", linewidth=0.6)
    axis.set_yticks(range(len(spans)), [f"rank {rank}" for rank in spans])
    axis.invert_yaxis()
