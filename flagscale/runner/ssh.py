"""Runs a job on several hosts over ssh: preflight, start everywhere, show all logs, end together.

Each host is served by one ssh connection and `runner.node`, which starts the node's script, watches it as the local
launcher watches a local job, and ends it when the connection ends. So a host that is lost, a launcher that is killed
and a rank that dies all end the whole job.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.config.errors import UserError
from flagscale.config.hostfile import Host
from flagscale.runner import failure, node, processes
from flagscale.runner.hosts import LOST, ssh_command
from flagscale.runner.local import Signals
from flagscale.runner.progress import Console, Progress
from flagscale.runner.record import RunRecord, boot_id

_POLL_S = 0.2
_MARGIN_S = 5.0
_HOLD_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SshJob:
    """What is started on which hosts."""

    exp_dir: Path
    hosts: Sequence[Host]
    requests: Sequence[Mapping[str, Any]]
    """The request of `runner.node run` for each host."""
    options: Sequence[str]
    train_iters: int
    log_interval: int
    stop_grace: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job on several hosts ended: the exit code, and the hosts whose connection broke."""

    code: int
    lost: tuple[Host, ...] = ()
    is_stopped: bool = False
    """Whether a signal to the launcher ended it."""


@dataclass(kw_only=True, slots=True)
class _Connection:
    host: Host
    process: subprocess.Popen[str]
    released: bool = False
    """Whether its lifeline was cut from here."""

    def release(self) -> None:
        """End the job on the host: its standard input ends."""
        if not self.released:
            self.released = True
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):  # it has gone already
                self.process.stdin.close()


def run(job: SshJob, console: Console, *, on_started: Callable[[], None] = lambda: None) -> Outcome:
    """Run a job on its hosts to its end; the caller holds the folder's claim.

    The code is 0 when all hosts end well, 2 for a user's mistake that a rank found, 128 + n when this launcher got
    signal n, else that of the host that failed first.
    """
    (job.exp_dir / "logs").mkdir(parents=True, exist_ok=True)
    (job.exp_dir / "logs" / failure.USER_ERROR).unlink(missing_ok=True)
    progress = Progress(job.exp_dir, console, train_iters=job.train_iters, log_interval=job.log_interval)
    lines: queue.Queue[str] = queue.Queue()
    signals = Signals()
    with signals.noted():
        connections = [_connect(job, index) for index in range(len(job.hosts))]
        readers = [_read(connection, lines) for connection in connections]
        try:
            _record(job).save(job.exp_dir)
            on_started()
            console.line(f"logs: {job.exp_dir / 'nodes'} on {', '.join(host.address for host in job.hosts)}")
            outcome = _watch(job, connections, signals, lambda: _show(job, lines, console, progress))
        finally:
            _end(connections, job.stop_grace, signals, lambda: _show(job, lines, console, progress))
        for reader in readers:
            reader.join(timeout=_HOLD_S)
        _show(job, lines, console, progress)
        console.keep_status()
    for host in outcome.lost:
        console.line(f"host {host.address}: the connection was lost")
    return outcome


def _connect(job: SshJob, index: int) -> _Connection:
    """Start the node's agent on a host and hand it its request."""
    host = job.hosts[index]
    process = subprocess.Popen(
        ssh_command(host, "run", job.options),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the job in order
        preexec_fn=processes.die_with_parent,
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # if ssh has ended, its exit code and words say why
        process.stdin.write(json.dumps(job.requests[index]) + "\n")
        process.stdin.flush()
    return _Connection(host=host, process=process)


def _read(connection: _Connection, lines: queue.Queue[str]) -> threading.Thread:
    """Collect a host's lines, each with its prefix. Only once all connections are made: a fork needs one thread."""
    assert connection.process.stdout is not None
    output, address = connection.process.stdout, connection.host.address

    def read() -> None:
        for line in output:
            text = line.rstrip("\n")
            lines.put(text if text.startswith((f"[{address}", node.FORWARDED)) else f"[{address}] {text}")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return reader


def _record(job: SshJob) -> RunRecord:
    pid = os.getpid()
    ticks = processes.start_ticks(pid) or 0
    return RunRecord(
        run_id=uuid.uuid4().hex,
        host=socket.gethostname(),
        boot_id=boot_id(),
        launcher_pid=pid,
        launcher_ticks=ticks,
        job_pid=pid,
        job_ticks=ticks,
        command=["ssh", *(host.target for host in job.hosts)],
        train_iters=job.train_iters,
        started_at=time.time(),
    )


def _watch(job: SshJob, connections: Sequence[_Connection], signals: Signals, show: Callable[[], None]) -> Outcome:
    """Show what comes until all hosts have ended, one has failed, or a signal came."""
    while True:
        show()
        if signals.received:
            return Outcome(code=128 + signals.received[0], is_stopped=True)
        ended = [connection for connection in connections if connection.process.poll() is not None]
        failed = [connection for connection in ended if connection.process.returncode != 0]
        if failed:
            return _judged(job, connections, show)
        if len(ended) == len(connections):
            return Outcome(code=0)
        time.sleep(_POLL_S)


def _judged(job: SshJob, connections: Sequence[_Connection], show: Callable[[], None]) -> Outcome:
    """One host has failed: its code is the job's. A lost connection counts only if no host reports a failure itself.

    When a host vanishes, others may fail a moment earlier, because they miss it before ssh does; so wait a little.
    """
    deadline = time.monotonic() + _HOLD_S
    while time.monotonic() < deadline and any(connection.process.poll() is None for connection in connections):
        show()
        time.sleep(_POLL_S)
    codes = {connection.host.address: connection.process.poll() for connection in connections}
    lost = tuple(connection.host for connection in connections if connection.process.returncode == LOST)
    if failure.user_error(job.exp_dir / "logs") is not None or 2 in codes.values():
        return Outcome(code=2)
    own = [code for code in codes.values() if code not in (None, 0, LOST)]
    return Outcome(code=own[0] if own and not lost else LOST if lost else 1, lost=lost)


def _end(connections: Sequence[_Connection], stop_grace: float, signals: Signals, show: Callable[[], None]) -> None:
    """End the job on every host, and wait for the hosts to say so."""
    for connection in connections:
        connection.release()
    deadline = time.monotonic() + stop_grace + _MARGIN_S
    while any(connection.process.poll() is None for connection in connections):
        show()
        if time.monotonic() > deadline or len(signals.received) > 1:
            break
        time.sleep(_POLL_S)
    for connection in connections:
        if connection.process.poll() is None:
            connection.process.send_signal(signal.SIGTERM)  # the host ends its job when the connection ends
            connection.process.wait()


def _show(job: SshJob, lines: queue.Queue[str], console: Console, progress: Progress) -> None:
    """Print the lines of all hosts, and store those that a host without the shared folder forwards."""
    while True:
        try:
            line = lines.get_nowait()
        except queue.Empty:
            break
        if line.startswith(node.FORWARDED):
            name, _, text = line.removeprefix(node.FORWARDED).partition(" ")
            if name in node.FORWARDED_FILES:
                with (job.exp_dir / name).open("a", encoding="utf-8") as file:
                    file.write(text + "\n")
        else:
            console.line(line)
    progress.poll()


def require_ssh() -> None:
    """There is an ssh client here.

    Raises:
        UserError: when there is none.
    """
    if shutil.which("ssh") is None:
        raise UserError("experiment.runner.type = 'ssh': there is no ssh client on this machine; install one")
