"""The tensors of the trainer's checkpoints, in terms of Hugging Face tensors.

A checkpoint does not depend on the layout that saved it: parameters are whole, in the row order of a single tensor
parallel rank. Megatron-Core stores most under their own name; the rows of Gated DeltaNet's projections under a name a
section; the blocks of the vision encoder, and the experts of a layer, as slices of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flagscale.config.errors import UserError
from flagscale.config.schema import ModelConfig
from flagscale.models.qwen35.canonical import canonical_shapes, check_names
from flagscale.models.qwen35.mapping import ParameterMap, parameter_map, parameter_names
from flagscale.plan.layout import LANGUAGE, VISION


@dataclass(frozen=True, slots=True)
class Stored:
    """One parameter of a single rank's model, as a checkpoint stores it.

    Attributes:
        name: of the parameter, for messages.
        keys: tensors of the checkpoint that hold its rows, one after the other.
        rows: how many rows each key holds.
        mapping: the parameter in terms of Hugging Face tensors.
        shape: of the parameter.
        slot: (number, count) when the parameter is slice `number` of a tensor of `count` along a new first dimension.
    """

    name: str
    keys: tuple[str, ...]
    rows: tuple[int, ...]
    mapping: ParameterMap
    shape: tuple[int, ...]
    slot: tuple[int, int] | None = None

    def from_canonical(self, get: Callable[[str], Tensor]) -> list[Tensor]:
        """The rows of each key, from Hugging Face tensors."""
        tensors = [get(name) for name in self.mapping.names]
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors, self.mapping.dim)
        if self.mapping.index is not None:
            whole = whole.index_select(self.mapping.dim, self.mapping.index(0, 1))
        return list(whole.reshape(self.shape).split(self.rows))

    def to_canonical(self, parts: list[Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The inverse: Hugging Face tensors of `shapes`, from the rows of each key."""
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        dim, sizes = self.mapping.dim, [shapes[name][self.mapping.dim] for name in self.mapping.names]
        if self.mapping.index is not None:
            whole = torch.empty_like(whole).index_copy_(dim, self.mapping.index(0, 1), whole)
        elif len(sizes) == 1:
            return {self.mapping.names[0]: whole.reshape(shapes[self.mapping.names[0]])}
        pieces = whole.split(sizes, dim)
        return {name: piece.reshape(shapes[name]) for name, piece in zip(self.mapping.names, pieces, strict=True)}


def stored_parameters(model: ModelConfig) -> Iterator[Stored]:
    """Every parameter of the model once, layer by layer."""
    shapes = canonical_shapes(model)
    for module in (VISION, LANGUAGE):
        for name in parameter_names(model, module):
            mapping = parameter_map(name, model)
            yield _stored(module, name, mapping, _shape(name, mapping, shapes), model)


def _stored(module: str, name: str, mapping: ParameterMap, shape: tuple[int, ...], model: ModelConfig) -> Stored:
    parts = name.split(".")
    slot = None
    if parts[:2] == ["blocks", "layers"]:
        slot = int(parts.pop(2)), model.vision_num_layers
    if "local_experts" in parts:
        at = parts.index("local_experts")
        slot = int(parts[at + 1]), model.num_experts
        parts[at : at + 2] = ["experts"]
    key = f"{module}." + ".".join(parts).replace(".mtp_model_layer.", ".transformer_layer.")
    sections = _sections(name, model)
    if sections is None:
        return Stored(name, (key,), (shape[0],), mapping, shape, slot)
    return Stored(name, tuple(f"{key}.{part}" for part in sections), tuple(sections.values()), mapping, shape, slot)


def _sections(name: str, model: ModelConfig) -> dict[str, int] | None:
    """Rows of each section of a Gated DeltaNet projection."""
    heads = model.linear_num_value_heads
    keys, values = model.linear_num_key_heads * model.linear_key_head_dim, heads * model.linear_value_head_dim
    qkv = {"query": keys, "key": keys, "value": values}
    if name.endswith("self_attention.in_proj.weight"):
        return {**qkv, "z": values, "beta": heads, "alpha": heads}
    return qkv if name.endswith("self_attention.conv1d.weight") else None


def _shape(name: str, mapping: ParameterMap, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    whole = list(shapes[mapping.names[0]])
    whole[mapping.dim] = sum(shapes[part][mapping.dim] for part in mapping.names)
    if name == "patch_embed.weight":  # a convolution there, a linear layer here
        return whole[0], whole[1] * whole[2] * whole[3] * whole[4]
    return tuple(whole)


def stored_sizes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Global shape of every tensor of a checkpoint's weights."""
    sizes = {}
    for stored in stored_parameters(model):
        for key, rows in zip(stored.keys, stored.rows, strict=True):
            stack = () if stored.slot is None else (stored.slot[1],)
            sizes[key] = (*stack, rows, *stored.shape[1:])
    return sizes


def check_stored(where: str, found: dict[str, tuple[int, ...]], model: ModelConfig) -> None:
    """The weights of a checkpoint fit the model.

    Args:
        where: the checkpoint, for the message.
        found: shapes of its tensors; those of optimizers and the like are left alone.

    Raises:
        UserError: a tensor is missing, unexpected, or of another shape; names are the checkpoint's.
    """
    expected = stored_sizes(model)
    weights = {key for key in found if key.startswith((f"{VISION}.", f"{LANGUAGE}."))}
    check_names(where, weights, set(expected))
    for key, size in expected.items():
        if found[key] != size:
            raise UserError(
                f"{where}: {key} has shape {found[key]}, the model has {size}; "
                "take the model config that belongs to these weights"
            )
