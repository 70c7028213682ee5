"""How a rank tells the launcher why it ended, where the user rather than the program has to change something."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from flagscale.config.errors import UserError
from flagscale.config.schema import Config
from flagscale.plan.advice import divergence_advice, memory_advice, peer_advice, reader_advice
from flagscale.train.optimizer import StepOutcome
from flagscale.train.place import Place, log_folder

ENDING = "ending.json"
MEMORY, PEER, READER, NOT_FINITE = "memory", "peer", "reader", "not finite"
_NO_MEMORY = re.compile(r"out of memory|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory")
# What Gloo and NCCL say when another rank does not answer any more.
_NO_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited|gloo.*Timed out waiting"
    r"|NCCL.*(Watchdog|timeout|abort)|ncclRemoteError|ncclSystemError"
)
# What DataLoader and torch say, in one line of their message, when a process that reads ahead cannot go on.
_NO_READER = re.compile(
    r"DataLoader worker \(pid.*|Pin memory thread exited.*|unable to (allocate|open) shared memory.*"
)
_DETAILS = re.compile(r" Of the allocated memory| If reserved|\. \(Triggered|\nException raised|\n")


class NotFiniteError(RuntimeError):
    """Too many steps in a row had gradients that are not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Why this rank ended, for the launcher (`runner/failure.py`).

    Attributes:
        kind: `memory`, `peer` (another rank has gone), `reader` (a process that reads ahead has) or `not finite`.
        message: what happened where, and the keys that would help.
        time: seconds since 1970.
    """

    kind: str
    message: str
    time: float


def report_user_error(exp_dir: Path, rank: int, error: UserError) -> None:
    """Writes logs/user-error.json, which the launcher shows instead of a traceback; the first rank's stays."""
    target = exp_dir / "logs" / "user-error.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()
    try:
        with target.open("x") as file:
            json.dump({"rank": rank, "message": str(error)}, file)
    except FileExistsError:
        pass  # another rank was first


def explain(error: BaseException, place: Place, config: Config) -> Ending | None:
    """What to say instead of a traceback; None for an error that only its traceback explains."""
    text = str(error)
    what = _DETAILS.split(text, maxsplit=1)[0].strip().rstrip(".")
    if isinstance(error, NotFiniteError):
        kind, message = NOT_FINITE, f"{what}; {divergence_advice(config)}"
    elif isinstance(error, RuntimeError) and (said := _NO_READER.search(f"{error.__cause__}\n{text}")):
        # The cause, where there is one, names the signal.
        kind, message = READER, f"lost a process that reads ahead {place}: {said[0].strip().rstrip('.')}; "
        message += reader_advice(config)
    elif isinstance(error, torch.OutOfMemoryError | MemoryError) or _is(error, _NO_MEMORY):
        kind, message = MEMORY, f"ran out of memory {place}: {what or type(error).__name__}; "
        message += memory_advice(config, place.phase)
    elif isinstance(error, dist.DistNetworkError | dist.DistStoreError) or _is(error, _NO_PEER):
        kind, message = PEER, f"lost another rank {place}: {what}; {peer_advice(config)}"
    else:
        return None
    return Ending(kind=kind, message=message, time=time.time())


def _is(error: BaseException, pattern: re.Pattern[str]) -> bool:
    """Whether an error of torch or of a backend says this."""
    return isinstance(error, RuntimeError | OSError) and pattern.search(str(error)) is not None


def leave_if_explained(error: BaseException, place: Place, config: Config) -> None:
    """Ends this process when there is an explanation: it goes beside this rank's log, the traceback into the log.

    Peers may wait in a collective that never completes, and this rank's own groups may not end: torchrun ends the job.
    """
    ending = explain(error, place, config)
    if ending is None:
        return
    traceback.print_exception(error)
    folder = log_folder()
    if folder is not None:
        (folder / ENDING).write_text(json.dumps(asdict(ending)))
    sys.stderr.write(f"{ending.message}\n")
    sys.stderr.flush()
    os._exit(1)


class SkippedSteps:
    """Counts steps that were skipped in a row, and ends the run when they are too many.

    Args:
        limit: as many end it; 0 never does.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0

    def note(self, outcome: StepOutcome, iteration: int) -> None:
        """Takes one step into account. Collective over the world when it raises.

        Raises:
            NotFiniteError: on every rank alike, naming the ranks where the values come from.
        """
        self._count = self._count + 1 if outcome.skipped else 0
        if self._limit and self._count >= self._limit:
            first = iteration - self._count + 1
            raise NotFiniteError(
                f"the last {self._count} steps (iterations {first} to {iteration}) were skipped, their gradients are "
                f"not finite: {_origin(outcome)}"
            )


def _origin(outcome: StepOutcome) -> str:
    """Which ranks and phases the values that are not finite come from. Collective over the world."""
    everyone = [torch.empty_like(outcome.local) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, outcome.local)
    bad = [(~rank.isfinite()).tolist() for rank in everyone]
    losses = [rank for rank, (_, _, _, *sums) in enumerate(bad) if any(sums)]
    if losses:
        # A gradient that is reduced spreads over its replicas; the loss is still each rank's own.
        return f"phase language, the loss of rank {_listed(losses)}"
    vision, language, other = ([rank for rank, flags in enumerate(bad) if flags[i]] for i in range(3))
    phase = "language" if language else "vision_backward" if vision else "reduce"
    return f"phase {phase}, with a finite loss, gradients held by rank {_listed(language or vision or other)}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
