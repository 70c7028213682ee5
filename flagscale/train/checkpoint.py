"""Saving and resuming through Megatron-Core's distributed checkpoints.

A checkpoint is a folder `iter_0000100` that was written under another name and renamed when whole, so a folder with
that name is always complete. It holds both modules, both optimizers, the schedule and the iteration; the data order
follows from the iteration alone. Weights and optimizer state can be loaded at any other layout.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import CheckpointException

from flagscale.config.errors import UserError

if TYPE_CHECKING:
    from flagscale.train.build import TrainState

_NAME = re.compile(r"iter_(\d{7})")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: `exp_dir/checkpoints`, seen by every rank.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def newest(self) -> Path | None:
        """The whole checkpoint of the highest iteration."""
        found = self._all()
        return found[-1] if found else None

    def save(self, state: TrainState, progress: dict[str, Any]) -> Path:
        """Writes a checkpoint. Collective over the world.

        Args:
            progress: the loop's own numbers; `iteration` (iterations done) names the checkpoint.
        """
        target = self._folder / f"iter_{progress['iteration']:07d}"
        partial = self._folder / f".partial-{target.name}"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        state.finish_gathers()
        content = _sharded_state(state, loading=False)
        content |= {"progress": progress, "scheduler": state.scheduler.state_dict()}
        dist_checkpointing.save(content, str(partial))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            for old in self._all()[: -self._keep]:
                shutil.rmtree(old)
        dist.barrier()
        return target

    def load(self, state: TrainState, checkpoint: Path) -> dict[str, Any]:
        """Restores weights, optimizers and schedule, and returns the saved `progress`. Collective over the world.

        Raises:
            UserError: when the checkpoint is of another model.
        """
        with torch.no_grad():  # the buffers loaded into are views of leaves
            try:
                content = dist_checkpointing.load(_sharded_state(state, loading=True), str(checkpoint))
            except (KeyError, dist_checkpointing.core.CheckpointingException, CheckpointException) as error:
                reason = misfit(error)
                if reason is None:
                    raise
                raise UserError(
                    f"{checkpoint}: does not fit the configured model ({reason}). "
                    "Choose another experiment.exp_dir, or the model configuration the checkpoint was saved with."
                ) from error
            for name, module in state.raw.items():
                module.load_state_dict(content[name], strict=True)
            for name, optimizer in state.optimizer.optimizers.items():
                optimizer.load_state_dict(content[f"optimizer_{name}"])
        state.scheduler.load_state_dict(content["scheduler"])
        return content["progress"]

    def _all(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))


def misfit(error: BaseException) -> BaseException | None:
    """What says that a checkpoint is of another model, out of an error of loading; None when it has another cause.

    torch collects the exceptions of all ranks in one of its own, which is no `Exception`; a tensor of another size
    comes so.
    """
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return error if isinstance(error, KeyError | dist_checkpointing.core.CheckpointingException) else None


def _sharded_state(state: TrainState, *, loading: bool) -> dict[str, Any]:
    """State of both modules and optimizers, described for sharded reading and writing."""
    sharded: dict[str, Any] = {}
    for name, module in state.raw.items():
        # Without the module's own group the replica ids would follow the language layout.
        metadata = {
            "dp_cp_group": state.topology.groups[name].dp_cp,
            "distrib_optim_sharding_type": "fully_reshardable",
        }
        sharded[name] = module.sharded_state_dict(prefix=f"{name}.", metadata=metadata)
        if name in state.optimizer.optimizers:
            optimizer = state.optimizer.optimizers[name]
            sharded[f"optimizer_{name}"] = optimizer.sharded_state_dict(
                sharded[name], is_loading=loading, metadata=metadata
            )
            dist_checkpointing.utils.add_prefix_for_sharding(sharded[f"optimizer_{name}"], f"optimizer.{name}.")
        sharded[name] = {key.removeprefix(f"{name}."): value for key, value in sharded[name].items()}
    return sharded
