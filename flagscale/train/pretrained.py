"""Weights to start from: a Hugging Face folder, or the weights of a checkpoint of any layout."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from flagscale.config.errors import UserError
from flagscale.config.schema import ModelConfig
from flagscale.models.qwen35.hf_files import HFWeights
from flagscale.models.qwen35.stored import check_stored
from flagscale.models.qwen35.weights import load_canonical
from flagscale.plan.safetensors import is_hf_folder


def load_pretrained(
    modules: dict[str, torch.nn.Module],
    groups: dict[str, ProcessGroupCollection],
    model: ModelConfig,
    folder: Path,
) -> None:
    """Fills the parameters of this rank's modules. Collective over the world for a checkpoint.

    A rank reads what it holds, tensor by tensor, from a Hugging Face folder, and its shards from a checkpoint.

    Args:
        modules: unwrapped, before the optimizer copies its parameters.
        groups: process groups of each module.
        folder: `system.checkpoint.pretrained`.

    Raises:
        UserError: the folder is damaged, or holds another model; tensor and both shapes are named.
    """
    if is_hf_folder(folder):
        with HFWeights(folder, model) as weights:
            for module in modules.values():
                load_canonical(module, model, weights.get)
        return
    check_stored(str(folder), checkpoint_sizes(folder), model)
    sharded = {}
    for name, module in modules.items():
        metadata = {"dp_cp_group": groups[name].dp_cp}
        state = module.sharded_state_dict(prefix=f"{name}.", metadata=metadata)
        # Transformer Engine's extra state is empty without FP8, and a checkpoint from another platform lacks it.
        tensors = {key: value for key, value in state.items() if not isinstance(value, ShardedObject)}
        sharded[name] = {key.removeprefix(f"{name}."): value for key, value in tensors.items()}
    with torch.no_grad():
        content = dist_checkpointing.load(sharded, str(folder))
        for name, module in modules.items():
            left = module.load_state_dict(content[name], strict=False)
            assert all(key.endswith("_extra_state") for key in left.missing_keys), left.missing_keys


def checkpoint_sizes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Global shapes of the tensors of a checkpoint folder.

    Raises:
        UserError: the folder is no checkpoint of the trainer.
    """
    try:
        entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged pickle can fail in any way
        raise UserError(
            f"{folder}: is neither a checkpoint (an iter_ folder of a run, or written by tools/checkpoint/convert.py) "
            f"nor a Hugging Face folder ({type(error).__name__}: {error})"
        ) from error
    return {key: tuple(entry.size) for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
