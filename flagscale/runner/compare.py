"""Runs side by side, from their `metrics.jsonl`: a table for the terminal and a pull request, and a figure."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.config.errors import UserError

HEADER = (
    "run",
    "iterations",
    "step time (s)",
    "tokens/s",
    "TFLOP/s a GPU",
    "speed-up",
    "mean loss diff",
    "max loss diff",
    "load max/mean",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The training lines of one run, by iteration; of an iteration written twice (resumed) the later counts."""

    name: str
    lines: dict[int, dict[str, Any]]

    def values(self, key: str, *, skip: int = 0) -> list[float]:
        """What was reported under `key`, without the first `skip` iterations."""
        ordered = [self.lines[iteration] for iteration in sorted(self.lines)][skip:]
        return [float(line[key]) for line in ordered if line.get(key) is not None]

    def median(self, key: str, *, skip: int) -> float | None:
        """The median, which a pause for a checkpoint or validation does not move; None when nothing was reported."""
        values = self.values(key, skip=skip)
        return statistics.median(values) if values else None


def read_run(folder: Path, name: str) -> Run:
    """Read a run's metrics.

    Raises:
        UserError: when the folder has none.
    """
    path = folder / "metrics.jsonl" if folder.is_dir() else folder
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give folders of runs, which hold a metrics.jsonl") from error
    lines: dict[int, dict[str, Any]] = {}
    for line in text.split("\n"):
        try:
            values = json.loads(line)
        except ValueError:  # empty, or cut off by a crash
            continue
        if isinstance(values, dict) and "iteration_time_s" in values:
            lines[int(values["iteration"])] = values
    if not lines:
        raise UserError(f"{path}: holds no training iteration; compare runs that have trained")
    return Run(name=name, lines=lines)


def loss_differences(reference: Run, run: Run) -> dict[int, float]:
    """Iteration -> |loss - reference loss| / |reference loss|, over the iterations that both have."""
    differences: dict[int, float] = {}
    for iteration in sorted(reference.lines.keys() & run.lines.keys()):
        expected, actual = (r.lines[iteration].get("lm_loss") for r in (reference, run))
        if expected and actual is not None:
            differences[iteration] = abs(actual - expected) / abs(expected)
    return differences


def table_rows(runs: list[Run], skip: int) -> list[tuple[str, ...]]:
    """A row a run, under `HEADER`."""
    reference = runs[0]
    base_time = reference.median("iteration_time_s", skip=_skipped(reference, skip))
    rows: list[tuple[str, ...]] = []
    for run in runs:
        left_out = _skipped(run, skip)
        step_time = run.median("iteration_time_s", skip=left_out)
        differences = list(loss_differences(reference, run).values()) if run is not reference else []
        loads = run.values("vision_load_max_over_mean", skip=left_out)
        rows.append(
            (
                run.name,
                str(len(run.lines)),
                _number(step_time, "{:.4g}"),
                _number(run.median("tokens_per_s", skip=left_out), "{:,.0f}"),
                _number(run.median("tflops_per_gpu", skip=left_out), "{:.4g}"),
                _number(base_time / step_time if base_time and step_time else None, "{:.2f}x"),
                _number(statistics.fmean(differences) if differences else None, "{:.2e}"),
                _number(max(differences) if differences else None, "{:.2e}"),
                _number(statistics.fmean(loads) if loads else None, "{:.3f}"),
            )
        )
    return rows


def markdown(rows: list[tuple[str, ...]]) -> str:
    """The rows as a Markdown table; numbers are aligned right."""
    lines = [HEADER, (":--", *["--:"] * (len(HEADER) - 1)), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def write_figure(runs: list[Run], path: Path) -> None:
    """Loss curves, their relative difference to the first run, and step times, one above the other."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (losses, differences, times) = plt.subplots(3, 1, figsize=(8, 9), sharex=True, layout="constrained")
    for run in runs:
        iterations = sorted(run.lines)
        losses.plot(iterations, [run.lines[i].get("lm_loss") for i in iterations], label=run.name)
        times.plot(iterations, [run.lines[i]["iteration_time_s"] for i in iterations], label=run.name)
        by_iteration = loss_differences(runs[0], run)
        differences.plot(list(by_iteration), list(by_iteration.values()), label=run.name)
    losses.set_ylabel("language model loss")
    differences.set_ylabel(f"relative difference to {runs[0].name}")
    differences.set_yscale("symlog", linthresh=1e-7)
    times.set_ylabel("step time (s)")
    times.set_ylim(bottom=0)
    times.set_xlabel("iteration")
    losses.legend()
    for axes in (losses, differences, times):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def run_names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise UserError("a run is given twice; give each folder once")
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(paths):
        length += 1
    return ["/".join(path.parts[-length:]) for path in paths]


def show(rows: list[tuple[str, ...]]) -> None:
    """The table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for number, title in enumerate(HEADER):
        # Narrow titles leave room for the names of a sweep, which differ at their ends; nothing is cut off.
        table.add_column(title.replace(" ", "\n"), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _skipped(run: Run, skip: int) -> int:
    """Iterations left out of a run's times: at most half of them."""
    return min(skip, len(run.lines) // 2)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
