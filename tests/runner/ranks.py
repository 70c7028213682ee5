"""Ranks of a running job as processes, and what a job has left that started again from a checkpoint."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path


def rank_process(variable: str, rank: int) -> int:
    """Id of the process that is a rank of the job whose processes have `NAME=value` in their environment.

    torchrun gives RANK to the process it starts, which hands it on to children of its own.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                variables = set((entry / "environ").read_bytes().decode(errors="replace").split("\0"))
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if {variable, f"RANK={rank}"} <= variables:
                    found[int(entry.name)] = int(parent)
    (pid,) = (pid for pid, parent in found.items() if parent not in found)
    return pid


def iterations_of(exp_dir: Path) -> list[int]:
    """The iterations in a run's metrics.jsonl, in its order."""
    return [json.loads(line)["iteration"] for line in (exp_dir / "metrics.jsonl").read_text().splitlines()]


def checkpoints(output: str) -> list[tuple[str, int]]:
    """(`saved` or `resumed from`, iteration) of a run's sentences about checkpoints, in their order."""
    return [(word, int(number)) for word, number in re.findall(r"\b(saved|resumed from) .*/iter_(\d+)", output)]


def check_restarted(exp_dir: Path, output: str, iterations: int) -> None:
    """A rank died, the job went on from the checkpoint that was the newest then, and came to its end."""
    told = checkpoints(output)
    ((place, resumed),) = ((place, number) for place, (word, number) in enumerate(told) if word == "resumed from")
    assert place > 0
    assert max(number for _, number in told[:place]) <= resumed < min(number for _, number in told[place + 1 :])
    assert iterations_of(exp_dir) == list(range(1, iterations + 1)), "none lost, none twice"
