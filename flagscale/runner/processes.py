"""Processes of a job: which they are, whether they live, and how they are ended.

A job is never found by a command's name. torchrun starts every rank in a session of its own, so one process group
does not hold them all; therefore every process of a job carries `FLAGSCALE_RUN_ID` in its environment, inherited by
whatever it starts, and `/proc/<pid>/environ` tells. A process id alone is not an identity either, since ids are
reused: the kernel's start time belongs to it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

RUN_ID = "FLAGSCALE_RUN_ID"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_KILL_S = 5.0


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is no such process or only its zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name, in brackets, may hold spaces and brackets itself: count from the last one (man 5 proc).
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int, ticks: int) -> bool:
    """Whether the process that had `pid` and started at `ticks` still runs."""
    return start_ticks(pid) == ticks


def members(run_id: str) -> list[int]:
    """Ids of all living processes that were started inside the job `run_id`, whatever session they are in."""
    marker = f"{RUN_ID}={run_id}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = Path(entry.path, "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile, or it is another user's
            continue
        if marker in variables and start_ticks(int(entry.name)) is not None:
            found.append(int(entry.name))
    return found


def send(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end_job(
    run_id: str,
    leader: int,
    grace_s: float,
    *,
    reap: Callable[[], object] = lambda: None,
    hurry: Callable[[], bool] = lambda: False,
) -> list[int]:
    """End every process of a job and return the ids that had to be killed.

    The leader (torchrun) gets SIGTERM first and passes it on to its ranks, so that a rank sees the signal once. When
    the leader is gone, what is left gets SIGTERM itself. What lives after `grace_s` seconds gets SIGKILL.

    Args:
        reap: called in every round, for a parent that must collect its child's exit status.
        hurry: when it returns true the grace ends at once (a second Ctrl-C).
    """
    deadline = time.monotonic() + grace_s
    told = [pid for pid in members(run_id) if pid == leader]
    send(told, signal.SIGTERM)
    while (left := members(run_id)) and time.monotonic() < deadline and not hurry():
        if leader not in left:
            orphans = [pid for pid in left if pid not in told]
            send(orphans, signal.SIGTERM)
            told += orphans
        reap()
        time.sleep(_POLL_S)
    return _kill_all(run_id, reap)


def _kill_all(run_id: str, reap: Callable[[], object]) -> list[int]:
    """SIGKILL, again until none is left: a process may start another between the look and the signal."""
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_S
    while (left := members(run_id)) and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        killed.update(left)
        reap()
        time.sleep(_POLL_S)
    reap()
    return sorted(killed)


def die_with_parent() -> None:
    """In a fresh child, before exec: ask the kernel for SIGTERM when the launcher dies, however it dies.

    Without it a launcher that is killed with SIGKILL leaves the job running with no one who watches it.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
