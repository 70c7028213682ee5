"""Runs a job on this machine: start, watch, end; in the foreground or in the background."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from flagscale.config.errors import UserError
from flagscale.runner import failure, processes
from flagscale.runner.progress import Console, Progress
from flagscale.runner.record import RunRecord, boot_id

LAUNCHER_LOG = "launcher.log"
_POLL_S = 0.2
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalJob:
    """What is started in a folder, and how it is watched."""

    exp_dir: Path
    command: list[str]
    """What the launcher starts, usually bash with the launch script of the folder."""
    train_iters: int
    log_interval: int
    stop_grace: float
    """Seconds between SIGTERM and SIGKILL."""

    @property
    def logs(self) -> Path:
        """Folder of everything the processes print."""
        return self.exp_dir / "logs"


class Signals:
    """Within the context, a signal that ends programs is noted instead of obeyed."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))

    @contextlib.contextmanager
    def noted(self) -> Iterator[Signals]:
        """Note signals until the context ends."""
        before = {number: signal.signal(number, self._note) for number in _ENDING}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_foreground(job: LocalJob, console: Console, *, on_started: Callable[[], None] = lambda: None) -> int:
    """Run a job to its end and return its exit code; the caller holds the folder's claim (`record.claim`).

    0: done. 2: a rank found a user's mistake. 128 + n: this launcher got signal n and ended the job. Else the job's.
    """
    job.logs.mkdir(parents=True, exist_ok=True)
    (job.logs / failure.USER_ERROR).unlink(missing_ok=True)
    progress = Progress(job.exp_dir, console, train_iters=job.train_iters, log_interval=job.log_interval)
    signals = Signals()
    with signals.noted():
        process, record = _start(job)
        try:
            on_started()
            console.line(f"logs: {job.logs} (launch script: {job.exp_dir / 'launch.sh'})")
            code = _watch(job, process, record, progress, signals)
        finally:
            # Also after an error of our own: a job that nobody watches must not stay.
            processes.end_job(record.run_id, process.pid, job.stop_grace, reap=process.poll)
        progress.poll()
        console.keep_status()
        return _finish(job, record, code, signals, console)


def _start(job: LocalJob) -> tuple[subprocess.Popen[bytes], RunRecord]:
    """Start the job in a session of its own and record it."""
    run_id = uuid.uuid4().hex
    started_at = time.time()
    with (job.logs / failure.TORCHRUN_LOG).open("wb") as output:
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, processes.RUN_ID: run_id},
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
        )
    record = RunRecord(
        run_id=run_id,
        host=socket.gethostname(),
        boot_id=boot_id(),
        launcher_pid=os.getpid(),
        launcher_ticks=processes.start_ticks(os.getpid()) or 0,
        job_pid=process.pid,
        job_ticks=processes.start_ticks(process.pid) or 0,
        command=job.command,
        train_iters=job.train_iters,
        started_at=started_at,
    )
    record.save(job.exp_dir)
    return process, record


def _watch(
    job: LocalJob, process: subprocess.Popen[bytes], record: RunRecord, progress: Progress, signals: Signals
) -> int:
    """Show progress until the job ends by itself or must be ended; its exit code."""
    ending_since: float | None = None
    while (code := process.poll()) is None:
        progress.poll()
        failure.link_rank_logs(job.logs, since=record.started_at)
        if signals.received:
            processes.end_job(
                record.run_id, process.pid, job.stop_grace, reap=process.poll, hurry=lambda: len(signals.received) > 1
            )
            return process.wait()
        if ending_since is None:
            if failure.others_are_ended((job.logs / failure.TORCHRUN_LOG).read_text(errors="replace")):
                ending_since = time.monotonic()
        elif time.monotonic() - ending_since > job.stop_grace:
            # torchrun waits 30 s for ranks that hang in a collective with the dead one. Kill them; it reports and ends.
            ranks = [pid for pid in processes.members(record.run_id) if pid != process.pid]
            processes.send(ranks, signal.SIGKILL)
        time.sleep(_POLL_S)
    return code


def _finish(job: LocalJob, record: RunRecord, code: int, signals: Signals, console: Console) -> int:
    """Record and report how the job ended; the launcher's exit code."""
    failure.link_rank_logs(job.logs, since=record.started_at)
    state, exit_code = "finished", 0
    if signals.received:
        state, exit_code = "stopped", 128 + signals.received[0]
        console.line(f"ended by {signals.received[0].name}; a run in this folder resumes from its newest checkpoint")
    elif code != 0:
        message = failure.user_error(job.logs)
        state, exit_code = "failed", 2 if message is not None else code if code > 0 else 128 - code
        console.line(
            f"error: {message}" if message else failure.first_failure(job.logs, since=record.started_at).report()
        )
    replace(record, state=state, exit_code=exit_code, ended_at=time.time()).save(job.exp_dir)
    return exit_code


def run_detached(job: LocalJob, console: Console) -> int:
    """Start a job in the background, watched by a launcher of its own, and return once it is started.

    The background launcher inherits the caller's claim on the folder and writes to `logs/launcher.log`.

    Raises:
        UserError: when the background launcher ended before the job was started.
    """
    job.logs.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    started, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(started)
        _run_in_background(job, report)
    os.close(report)
    with os.fdopen(started, "rb") as pipe:
        if not pipe.read(1):
            os.waitpid(pid, 0)
            raise UserError(f"{job.exp_dir}: the job could not be started; see {job.logs / LAUNCHER_LOG}")
    console.line(f"started in the background, process {pid}; logs: {job.logs}")
    console.line("the same command with action=query shows its state, with action=stop ends it")
    return 0


def _run_in_background(job: LocalJob, report: int) -> NoReturn:
    """In the forked child: leave the terminal, run the job, end."""
    code = 1
    try:
        os.setsid()
        with (job.logs / LAUNCHER_LOG).open("w") as log, open(os.devnull) as nothing:
            for number, file in ((0, nothing), (1, log), (2, log)):
                os.dup2(file.fileno(), number)
            code = run_foreground(job, Console(log), on_started=lambda: _report_started(report))
    except BaseException:
        traceback.print_exc()
    finally:
        # Never back into the caller's code, which belongs to the parent.
        sys.stderr.flush()
        os._exit(code)


def _report_started(report: int) -> None:
    os.write(report, b"1")
    os.close(report)
