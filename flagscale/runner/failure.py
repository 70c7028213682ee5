"""After a job failed: which rank failed first, why or with what traceback, in which log file.

When a rank dies its peers lose their connections and fail too, so most ranks leave a traceback and only one of them
is the cause. The witnesses, the better first: what a rank has said itself of an end that a user can do something about
(`ending.json`, of `train/failure.py`), the error files of ranks whose entrypoint torchrun records (they have a time),
torchrun's own "Root Cause" (the first exit it saw) and list of exits, and the ranks' logs. Where a rank was when a
signal ended it stands in its `place.json`.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TORCHRUN_LOG = "torchrun.log"
USER_ERROR = "user-error.json"
ENDING, PLACE = "ending.json", "place.json"
_TRACEBACK = "Traceback (most recent call last)"
_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?rank\s*: (?P<rank>\d+) ", re.DOTALL)
_EXIT = re.compile(r"rank\s*: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s*: (?P<code>-?\d+)")
_ENDING_OTHERS = re.compile(r"Sending process (\d+) closing signal")
# What a rank says when another one has gone.
_SECOND_HAND = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited|NCCL.*abort"
)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before every line of a traceback
_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout|ProcessGroupNCCL.*(timed out|timeout)")
_LONGEST_LINES = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The first failure of a job. `rank` is None when torchrun itself failed.

    `cause` is a sentence for a signal; `explanation` says what happened where and what would help, so that the
    traceback can stay in the log.
    """

    rank: int | None
    traceback: str
    log: Path
    cause: str = ""
    explanation: str = ""

    def report(self) -> str:
        """What the terminal shows."""
        who = "the job" if self.rank is None else f"rank {self.rank}"
        if self.explanation:
            return f"{self.explanation}\nlog of {who}: {self.log}"
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
    exits = {int(found["rank"]): int(found["code"]) for found in _EXIT.finditer(torchrun_text)}
    endings = {rank: ending for rank, folder in ranks.items() if (ending := _json(folder / ENDING))}
    own = [rank for rank, ending in endings.items() if ending["kind"] != "peer"]
    rank = min(own, key=lambda rank: endings[rank]["time"]) if own else _cause(ranks, exits, torchrun_text)
    if rank is None:
        return Failure(rank=None, traceback=last_traceback(torchrun_text), log=logs / TORCHRUN_LOG)
    log, link = ranks[rank] / "stderr.log", logs / f"rank{rank}.err"
    text, code = _read(log), exits.get(rank, 0)
    return Failure(
        rank=rank,
        traceback=last_traceback(text),
        log=link if link.exists() else log,
        cause=_signal_cause(code),
        explanation=_explanation(f"rank {rank}", code, text, endings.get(rank, {}), _json(ranks[rank] / PLACE)),
    )


def _cause(ranks: dict[int, Path], exits: dict[int, int], torchrun_text: str) -> int | None:
    """The rank that is most likely the cause, where none has said so itself."""
    root = _ROOT_CAUSE.search(torchrun_text)
    rank = _first_recorded(ranks)
    if rank is None and root is not None and int(root["rank"]) in ranks:
        rank = int(root["rank"])
    if rank is None or _is_second_hand(ranks[rank]):
        # torchrun itself ends the ranks that are left with SIGTERM.
        killed = (other for other, code in exits.items() if code < 0 and code != -signal.SIGTERM and other in ranks)
        rank = next(_own_tracebacks(ranks), next(killed, rank))
    return rank


def _explanation(who: str, code: int, text: str, ending: dict[str, Any], place: dict[str, Any]) -> str:
    """What happened where and what would help; empty where only the log can tell.

    Args:
        who: names the rank.
        code: how it exited; negative for a signal.
        text: its standard error.
        ending: what it has said itself; empty when nothing.
        place: where it was last; empty when unknown.
    """
    if ending:
        return str(ending["message"]) if ending["kind"] == "not finite" else f"{who} {ending['message']}"
    if place and code == -signal.SIGKILL:
        return f"{who} was {_signal_cause(code)} {place['where']}; if so: {place['memory']}; {place['peer']}"
    if place and code < 0 and _WATCHDOG.search(text):
        return f"{who} waited in vain for another rank {place['where']} (NCCL gave up); {place['peer']}"
    return ""


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


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    try:
        tree = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
