"""After a job failed: which rank failed first, with what traceback, in which log file.

When a rank dies its peers lose their connections and fail too, so most ranks leave a traceback and only one of them
is the cause. Three witnesses, the better first: the error files of ranks whose entrypoint torchrun records (they have
a time), torchrun's own "Root Cause" (the first exit it saw), and the ranks' logs.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TORCHRUN_LOG = "torchrun.log"
USER_ERROR = "user-error.json"
_TRACEBACK = "Traceback (most recent call last)"
_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?rank\s*: (?P<rank>\d+) .*?exitcode\s*: (?P<code>-?\d+)", re.DOTALL
)
_ENDING_OTHERS = re.compile(r"Sending process (\d+) closing signal")
# What a rank says when another one has gone.
_SECOND_HAND = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited|NCCL.*abort"
)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before every line of a traceback
_LONGEST_LINES = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The first failure of a job. `rank` is None when torchrun itself failed; `cause` is a sentence for a signal."""

    rank: int | None
    traceback: str
    log: Path
    cause: str = ""

    def report(self) -> str:
        """What the terminal shows."""
        who = "the job" if self.rank is None else f"rank {self.rank}"
        parts = [f"{who} failed{f': {self.cause}' if self.cause else ''}", self.traceback, f"log of {who}: {self.log}"]
        return "\n".join(part for part in parts if part)


def user_error(logs: Path) -> str | None:
    """The message of a user's mistake that a rank found, if one did."""
    try:
        return str(json.loads((logs / USER_ERROR).read_text())["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def ranks_told_to_end(logs: Path) -> list[int]:
    """Ids of the processes that torchrun told to end, since it saw another rank die."""
    return [int(pid) for pid in _ENDING_OTHERS.findall(_read(logs / TORCHRUN_LOG))]


def link_rank_logs(logs: Path, *, since: float) -> None:
    """Make `rank0.out` and `rank0.err`, names that stay, for what torchrun keeps in a folder a start and rank."""
    for rank, folder in rank_folders(logs, since=since).items():
        for name, target in ((f"rank{rank}.out", "stdout.log"), (f"rank{rank}.err", "stderr.log")):
            link, path = logs / name, os.path.relpath(folder / target, logs)
            if not link.is_symlink() or os.readlink(link) != path:
                link.unlink(missing_ok=True)
                link.symlink_to(path)


def rank_folders(logs: Path, *, since: float) -> dict[int, Path]:
    """Rank -> folder with its `stdout.log`, `stderr.log` and perhaps `error.json`, of the newest start.

    Args:
        since: seconds since 1970; folders of earlier launches are left out.
    """
    attempts = [path for path in logs.glob("*/attempt_*") if path.is_dir() and path.stat().st_mtime >= since - 1]
    if not attempts:
        return {}
    newest = max(attempts, key=lambda path: (path.stat().st_mtime, path.name))
    return {int(path.name): path for path in newest.iterdir() if path.name.isdigit()}


def first_failure(logs: Path, *, since: float) -> Failure:
    """The cause of a failed job, from its log folder."""
    ranks = rank_folders(logs, since=since)
    torchrun_text = _read(logs / TORCHRUN_LOG)
    root = _ROOT_CAUSE.search(torchrun_text)
    rank = _first_recorded(ranks)
    if rank is None and root is not None and int(root["rank"]) in ranks:
        rank = int(root["rank"])
    if rank is None or _is_second_hand(ranks[rank]):
        rank = next(_own_tracebacks(ranks), rank)
    if rank is None:
        return Failure(rank=None, traceback=last_traceback(torchrun_text), log=logs / TORCHRUN_LOG)
    cause = _signal_cause(int(root["code"])) if root is not None and int(root["rank"]) == rank else ""
    log, link = ranks[rank] / "stderr.log", logs / f"rank{rank}.err"
    shown = link if link.exists() else log
    return Failure(rank=rank, traceback=last_traceback(_read(log)), log=shown, cause=cause)


def last_traceback(text: str) -> str:
    """The last traceback with what led to it ("During handling ..."), or the last lines when there is none."""
    lines = [_RANK_PREFIX.sub("", line) for line in text.rstrip().splitlines()]
    starts = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    if not starts:
        return "\n".join(lines[-_LONGEST_LINES // 2 :])
    start = starts[-1]
    for earlier in reversed(starts[:-1]):
        between = "\n".join(lines[earlier:start])
        if "During handling of the above" not in between and "direct cause of the following" not in between:
            break
        start = earlier
    block = lines[start:]
    if len(block) > _LONGEST_LINES:
        half = _LONGEST_LINES // 2
        block = [*block[:half], f"  ... {len(block) - 2 * half} lines left out ...", *block[-half:]]
    return "\n".join(block)


def _first_recorded(ranks: dict[int, Path]) -> int | None:
    """The rank whose error file has the earliest time."""
    times: dict[int, float] = {}
    for rank, folder in ranks.items():
        try:
            times[rank] = float(json.loads((folder / "error.json").read_text())["message"]["extraInfo"]["timestamp"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return min(times, key=lambda rank: (times[rank], rank)) if times else None


def _is_second_hand(folder: Path) -> bool:
    return _SECOND_HAND.search(last_traceback(_read(folder / "stderr.log"))) is not None


def _own_tracebacks(ranks: dict[int, Path]) -> Iterator[int]:
    """Ranks with a traceback that does not merely report a lost peer."""
    for rank, folder in sorted(ranks.items()):
        if _TRACEBACK in _read(folder / "stderr.log") and not _is_second_hand(folder):
            yield rank


def _signal_cause(exit_code: int) -> str:
    """A sentence for a rank that a signal ended; empty for an ordinary exit."""
    if exit_code >= 0:
        return ""
    name = signal.Signals(-exit_code).name
    hint = ", often the kernel when memory runs out" if name == "SIGKILL" else ""
    return f"ended by signal {-exit_code} ({name}{hint})"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
