"""Whether all ranks see one folder; on several machines without a shared file system they do not."""

from __future__ import annotations

import uuid
from pathlib import Path

import torch.distributed as dist

from flagscale.config.errors import UserError


def require_shared(folder: Path) -> None:
    """All ranks see the files that rank 0 writes into the folder, which is made. Collective over the world.

    Raises:
        UserError: on the ranks that see another folder, before hours of training end in a checkpoint that is no whole.
    """
    token = [uuid.uuid4().hex]
    dist.broadcast_object_list(token, src=0)
    mark = folder / f".seen-{token[0]}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    dist.barrier()
    is_seen = mark.exists()
    dist.barrier()
    if dist.get_rank() == 0:
        mark.unlink()
    if not is_seen:
        raise UserError(
            f"{folder}: rank {dist.get_rank()} does not see the folder of rank 0, where all save checkpoints; make "
            "it a link to one folder that every machine has"
        )
