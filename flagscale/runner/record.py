"""`exp_dir/run.json`: which processes are, or were, the run in this folder, and how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from flagscale.config.errors import ConfigError, UserError
from flagscale.runner import processes

RECORD = "run.json"
LOCK = "run.lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One launch. Times are seconds since 1970, `_ticks` the kernel's start times (see `processes`)."""

    run_id: str
    host: str
    boot_id: str
    launcher_pid: int
    launcher_ticks: int
    job_pid: int
    """Id of the process the launcher started (torchrun); its process group has the same number."""
    job_ticks: int
    command: list[str]
    train_iters: int
    started_at: float
    ended_at: float | None = None
    state: str = "running"
    """running, finished, failed or stopped, as far as the launcher could write it down."""
    exit_code: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether the recorded ids belong to this machine since its last start."""
        return (self.host, self.boot_id) == (socket.gethostname(), boot_id())

    @property
    def launcher_is_alive(self) -> bool:
        """Whether the launcher that wrote the record still runs."""
        return self.is_here and processes.is_alive(self.launcher_pid, self.launcher_ticks)

    @property
    def is_alive(self) -> bool:
        """Whether anything of the run still lives on this machine."""
        return self.is_here and (self.launcher_is_alive or bool(processes.members(self.run_id)))

    def save(self, exp_dir: Path) -> None:
        """Write the record; readers see the old or the new one, never half of it."""
        temporary = exp_dir / f".{RECORD}.{os.getpid()}"
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n")
        temporary.replace(exp_dir / RECORD)


def load_record(exp_dir: Path) -> RunRecord | None:
    """The record in a run's folder, None when nothing was started there.

    Raises:
        UserError: when the file is not a record.
    """
    path = exp_dir / RECORD
    try:
        return RunRecord(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not a record of a run ({error}); remove the file if no job runs there") from error


def boot_id() -> str:
    """The kernel's name for the time since it started; process ids mean nothing beyond it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def require_no_run(exp_dir: Path) -> None:
    """Nothing of a recorded run lives in a folder.

    Raises:
        UserError: when a job runs there.
    """
    record = load_record(exp_dir)
    if record is not None and record.is_alive:
        raise _taken(exp_dir, f"process {record.launcher_pid}")


@contextlib.contextmanager
def claim(exp_dir: Path) -> Iterator[None]:
    """Hold a run's folder for one launcher at a time.

    Raises:
        UserError: when a job runs there already.
        ConfigError: when the folder cannot be written.
    """
    require_no_run(exp_dir)
    with _opened_lock(exp_dir) as lock:
        try:
            # The kernel drops the lock when the launcher ends, so a stale file never blocks a run.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken(exp_dir, "another launcher") from None
        yield


def _opened_lock(exp_dir: Path) -> TextIO:
    try:
        exp_dir.mkdir(parents=True, exist_ok=True)
        return (exp_dir / LOCK).open("a")
    except OSError as error:
        raise ConfigError(
            "experiment.exp_dir",
            str(exp_dir),
            f"cannot be written ({error.strerror or error})",
            "choose a folder that you can write",
        ) from error


def _taken(exp_dir: Path, holder: str) -> UserError:
    return UserError(
        f"experiment.exp_dir={exp_dir}: a job runs in this folder ({holder}); a folder holds one running job. "
        "Wait for it, end it with action=stop, or choose another experiment.exp_dir"
    )
