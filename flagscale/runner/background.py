"""A launcher that goes on in the background after the command has returned."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from flagscale.config.errors import UserError
from flagscale.runner.progress import Console

LAUNCHER_LOG = "launcher.log"
Launch = Callable[[Console, Callable[[], None]], int]
"""(console, what to call once the job is started) -> exit code."""


def run_detached(exp_dir: Path, launch: Launch, console: Console) -> int:
    """Run a job in the background, watched by a launcher of its own, and return once it is started.

    The background launcher inherits the caller's claim on the folder and writes to `logs/launcher.log`.

    Raises:
        UserError: when the background launcher ended before the job was started.
    """
    logs = exp_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    started, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(started)
        _run_in_background(logs / LAUNCHER_LOG, launch, report)
    os.close(report)
    with os.fdopen(started, "rb") as pipe:
        if not pipe.read(1):
            os.waitpid(pid, 0)
            raise UserError(f"{exp_dir}: the job could not be started; see {logs / LAUNCHER_LOG}")
    console.line(f"started in the background, process {pid}; logs: {logs}")
    console.line("the same command with action=query shows its state, with action=stop ends it")
    return 0


def _run_in_background(log_path: Path, launch: Launch, report: int) -> NoReturn:
    """In the forked child: leave the terminal, run the job, end."""
    code = 1

    def report_started() -> None:
        nonlocal report
        if report >= 0:
            os.write(report, b"1")
            os.close(report)
            report = -1

    try:
        os.setsid()
        with log_path.open("w") as log, open(os.devnull) as nothing:
            for number, file in ((0, nothing), (1, log), (2, log)):
                os.dup2(file.fileno(), number)
            code = launch(Console(log), report_started)
    except BaseException:
        traceback.print_exc()
    finally:
        # Never back into the caller's code, which belongs to the parent.
        sys.stderr.flush()
        os._exit(code)
