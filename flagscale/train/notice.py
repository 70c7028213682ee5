"""A run that has to leave before its time ends: it saves a checkpoint, says so, and is started again later.

The batch script of the Slurm runner (`runner/sbatch.py`) makes a file when Slurm warns it of the time limit. A file
reaches all nodes and needs no signal handler in the ranks, where a signal may come in the middle of a collective.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from flagscale.plan.leave import LEAVE_REQUEST, LEFT


class LeaveNotice:
    """The request to leave.

    Args:
        exp_dir: the run's folder.
        device: of this rank, for the broadcast.
        watched: whether anybody may ask; without it nothing is looked for.
    """

    def __init__(self, exp_dir: Path, device: torch.device, *, watched: bool) -> None:
        self._request = exp_dir / LEAVE_REQUEST
        self._device = device
        self._watched = watched

    def is_given(self) -> bool:
        """Whether the run shall leave now, the same on every rank. Collective over the world when watched."""
        if not self._watched:
            return False
        given = torch.tensor(int(dist.get_rank() == 0 and self._request.exists()), device=self._device)
        dist.broadcast(given, src=0)
        return bool(given.item())

    def answer(self) -> None:
        """Tell the batch script that the run has saved and is not finished."""
        if dist.get_rank() == 0:
            self._request.rename(self._request.with_name(LEFT))
