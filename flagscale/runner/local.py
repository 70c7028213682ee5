"""Runs a job on this machine: start, watch, end."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Protocol

from flagscale.config.errors import ConfigError
from flagscale.config.schema import RunnerConfig
from flagscale.runner import failure, processes
from flagscale.runner.progress import Console, Progress
from flagscale.runner.record import RunRecord, boot_id

_POLL_S = 0.2
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalJob:
    """What is started in a folder, and how it is watched."""

    exp_dir: Path
    home: Path
    """Folder of the record, the launch script and the logs: `exp_dir`, or a node's own below it."""
    command: list[str]
    """What the launcher starts, usually bash with the launch script of the folder."""
    train_iters: int
    log_interval: int
    stop_grace: float
    """Seconds between SIGTERM and SIGKILL."""

    @property
    def logs(self) -> Path:
        """Folder of everything the processes print."""
        return self.home / "logs"


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


def require_meeting_place(runner: RunnerConfig) -> None:
    """The ranks can meet at `master_addr` and `master_port` of this machine.

    Raises:
        ConfigError: when they cannot; otherwise torchrun would say so, in many lines.
    """
    home, address, port = "experiment.runner", runner.master_addr, runner.master_port
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, port or 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
    except socket.gaierror as error:
        raise ConfigError(
            f"{home}.master_addr", address, f"is not known here ({error.strerror})", "use 127.0.0.1"
        ) from error
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            reason = "is in use" if error.errno == errno.EADDRINUSE else "is for the superuser"
            raise ConfigError(f"{home}.master_port", port, reason, "use another, or null for any free one") from error
        raise ConfigError(
            f"{home}.master_addr", address, f"is no address of this machine ({error.strerror})", "use 127.0.0.1"
        ) from error


class View(Protocol):
    """Something that shows what is new, called a few times a second and once after the end."""

    def poll(self) -> None: ...


def run_foreground(
    job: LocalJob, console: Console, *, on_started: Callable[[], None] = lambda: None, view: View | None = None
) -> int:
    """Run a job to its end and return its exit code; the caller holds the claim on its home (`record.claim`).

    Without a view the progress of the run is shown.

    0: done. 2: a rank found a user's mistake. 128 + n: this launcher got signal n and ended the job. Else the job's.
    """
    for logs in (job.exp_dir / "logs", job.logs):
        logs.mkdir(parents=True, exist_ok=True)
    (job.exp_dir / "logs" / failure.USER_ERROR).unlink(missing_ok=True)
    if view is None:
        view = Progress(job.exp_dir, console, train_iters=job.train_iters, log_interval=job.log_interval)
    signals = Signals()
    with signals.noted():
        process, record = _start(job)
        try:
            on_started()
            console.line(f"logs: {job.logs} (launch script: {job.home / 'launch.sh'})")
            code = _watch(job, process, record, view, signals)
        finally:
            # Also after an error of our own: a job that nobody watches must not stay.
            processes.end_job(record.run_id, process.pid, job.stop_grace, reap=process.poll)
        view.poll()
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
    record.save(job.home)
    return process, record


def _watch(job: LocalJob, process: subprocess.Popen[bytes], record: RunRecord, view: View, signals: Signals) -> int:
    """Show progress until the job ends by itself or must be ended; its exit code."""
    told: dict[int, float] = {}  # ranks that torchrun has told to end, since when
    while (code := process.poll()) is None:
        view.poll()
        failure.link_rank_logs(job.logs, since=record.started_at)
        if signals.received:
            processes.end_job(
                record.run_id, process.pid, job.stop_grace, reap=process.poll, hurry=lambda: len(signals.received) > 1
            )
            return process.wait()
        for pid in failure.ranks_told_to_end(job.logs):
            told.setdefault(pid, time.monotonic())
        late = [pid for pid, since in told.items() if time.monotonic() - since > job.stop_grace]
        if late:
            # torchrun waits 30 s for ranks that hang in a collective with the dead one. Kill them; it goes on.
            members = set(processes.members(record.run_id))
            processes.send([pid for pid in late if pid in members], signal.SIGKILL)
            told |= dict.fromkeys(late, float("inf"))
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
        message = failure.user_error(job.exp_dir / "logs")
        state, exit_code = "failed", 2 if message is not None else code if code > 0 else 128 - code
        console.line(
            f"error: {message}" if message else failure.first_failure(job.logs, since=record.started_at).report()
        )
    replace(record, state=state, exit_code=exit_code, ended_at=time.time()).save(job.home)
    return exit_code
