"""`action=query` and `action=stop`: what a recorded run does, and ending it; both may be repeated freely."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagscale.config.errors import UserError
from flagscale.runner import processes
from flagscale.runner.progress import Console, parse_metrics, progress_line
from flagscale.runner.record import RunRecord, load_record

_POLL_S = 0.1
_MARGIN_S = 3.0
_TAIL_BYTES = 65536


def query(exp_dir: Path, console: Console) -> int:
    """Show the state of the run in a folder and its last iteration; 0."""
    console.line(state_of(exp_dir))
    record = load_record(exp_dir)
    if record is not None:
        show_last_iteration(exp_dir, record.train_iters, console, runs=record.is_alive)
    return 0


def state_of(home: Path) -> str:
    """The folder of a record, and the state of its run."""
    record = load_record(home)
    return f"{home}: {'never started' if record is None else describe(record)}"


def show_last_iteration(exp_dir: Path, train_iters: int, console: Console, *, runs: bool) -> None:
    """The progress line of the last iteration, if there was one."""
    values = last_metrics(exp_dir / "metrics.jsonl")
    if values is not None:
        seconds_left = (train_iters - int(values["iteration"])) * float(values["iteration_time_s"])
        console.line(progress_line(values, train_iters, seconds_left if runs else None))


def describe(record: RunRecord) -> str:
    """The state of a run in words."""
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started_at))
    if record.state != "running":
        return f"{record.state} with exit code {record.exit_code} (started {started})"
    if record.launcher_is_alive:
        return f"running since {started}, process {record.launcher_pid}"
    if record.is_alive:
        return f"running since {started} without its launcher, which was killed; end it with action=stop"
    if not record.is_here:
        return f"started {started} on {record.host}; only there can be seen whether it still runs"
    return f"failed: it ended without a word (killed, or the machine restarted), started {started}"


def last_metrics(path: Path) -> Mapping[str, Any] | None:
    """The newest training line of metrics.jsonl, None when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        values = parse_metrics(line)
        if values is not None and "iteration_time_s" in values:
            return values
    return None


def stop(exp_dir: Path, stop_grace: float, console: Console) -> int:
    """End the run in a folder, if one runs; 0 when nothing of it is left.

    Its launcher is asked first and ends the job as on Ctrl-C. If the launcher is gone, or does not manage, the
    processes are ended from here.

    Raises:
        UserError: when the run is on another machine.
    """
    record = load_record(exp_dir)
    if record is None or record.state != "running":
        console.line(f"{exp_dir}: nothing to stop, {'never started' if record is None else describe(record)}")
        return 0
    if not record.is_here:
        raise UserError(f"experiment.exp_dir={exp_dir}: {describe(record)}; run action=stop on {record.host}")
    if record.launcher_is_alive:
        os.kill(record.launcher_pid, signal.SIGTERM)
        deadline = time.monotonic() + stop_grace + _MARGIN_S
        while record.launcher_is_alive and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    processes.end_job(record.run_id, record.job_pid, 0.0 if record.launcher_is_alive else stop_grace)
    if record.launcher_is_alive:
        processes.send([record.launcher_pid], signal.SIGKILL)
    latest = load_record(exp_dir)
    if latest is not None and latest.run_id == record.run_id and latest.state == "running":
        replace(latest, state="stopped", exit_code=128 + signal.SIGTERM, ended_at=time.time()).save(exp_dir)
    left = processes.members(record.run_id)
    console.line(f"{exp_dir}: stopped" if not left else f"{exp_dir}: processes {left} cannot be ended")
    return 1 if left else 0
