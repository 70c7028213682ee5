"""Weights in and out of both modules by their Hugging Face names, at any tensor, pipeline and expert parallel size."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from flagscale.config.errors import UserError
from flagscale.config.schema import ModelConfig
from flagscale.models.qwen35.canonical import (
    DECAY,
    NORMAL,
    ONES,
    TIME_STEP,
    Canonical,
    canonical_shapes,
    canonical_tensors,
)
from flagscale.models.qwen35.language import LanguageModel
from flagscale.models.qwen35.mapping import ParameterMap, parameter_map

__all__ = [
    "canonical_names",
    "canonical_shapes",
    "gather_canonical",
    "init_weights",
    "initial_tensor",
    "load_canonical",
    "unwrap",
]


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel and Float16Module."""
    while hasattr(module, "module"):
        module = module.module
    return module


def load_canonical(module: torch.nn.Module, model: ModelConfig, get: Callable[[str], Tensor]) -> None:
    """Fills every parameter of this rank from whole tensors.

    Args:
        module: a `VisionEncoder` or a stage of a `LanguageModel`, wrapped or not.
        get: Hugging Face name -> tensor, on any device and of any dtype. It is asked only for what this rank holds.

    Raises:
        UserError: a tensor has another shape than the model.
    """
    shapes = canonical_shapes(model)
    with torch.no_grad():
        for name, param, mapping in _mapped(module, model):
            tensors = [_checked(key, get(key), shapes[key]) for key in mapping.names]
            local = _select(tensors, mapping, *_tp(module))
            assert local.numel() == param.numel(), f"{name}: {tuple(local.shape)} for {tuple(param.shape)}"
            param.copy_(local.reshape(param.shape))


def init_weights(module: torch.nn.Module, model: ModelConfig, seed: int) -> None:
    """Initial weights that do not depend on the layout.

    Every whole tensor comes from a generator of its own, seeded by (seed, name), and is then cut. So any layout on the
    same kind of device starts from identical weights.
    """
    tensors = canonical_tensors(model)
    device = next(unwrap(module).parameters()).device
    load_canonical(module, model, lambda name: initial_tensor(name, tensors[name], model, seed, device))


def gather_canonical(module: torch.nn.Module, model: ModelConfig, what: str = "param") -> dict[str, Tensor]:
    """Whole tensors of this module's parameters or gradients, by their Hugging Face names.

    Collective in the module's tensor parallel group. A pipeline stage returns what it holds, an expert parallel rank
    its own experts; with tied embeddings the first and the last stage both return the embedding.

    Args:
        what: `param`, or `grad` for `main_grad` where there is one, else `grad`. Gradients of replicated parameters
            are taken as they are: sum them first where `tp_sum_params` says so.

    Returns:
        Tensors of Hugging Face's shapes; parameters without gradient are left out.
    """
    assert what in ("param", "grad"), what
    shapes = canonical_shapes(model)
    _, size = _tp(module)
    whole: dict[str, Tensor] = {}
    for _, param, mapping in _mapped(module, model):
        local = param.detach() if what == "param" else _gradient(param)
        if local is None:
            continue
        parts = [local]
        if mapping.index is not None and size > 1:
            parts = [torch.empty_like(local) for _ in range(size)]
            dist.all_gather(parts, local.contiguous(), group=unwrap(module).tp_group)
        whole.update(_scatter(parts, mapping, shapes))
    return whole


def canonical_names(module: torch.nn.Module, model: ModelConfig) -> dict[torch.nn.Parameter, tuple[str, ...]]:
    """Hugging Face names of what each parameter of this rank holds; several where one matrix joins them."""
    return {param: mapping.names for _, param, mapping in _mapped(module, model)}


def _mapped(module: torch.nn.Module, model: ModelConfig) -> Iterator[tuple[str, torch.nn.Parameter, ParameterMap]]:
    inner = unwrap(module)
    layers, experts = 0, 0
    if isinstance(inner, LanguageModel):
        layers = get_transformer_layer_offset(inner.config, None, inner.pp_group.rank())
        experts = inner.pg_collection.ep.rank() * model.num_experts // inner.pg_collection.ep.size()
    for name, param in inner.named_parameters():
        yield name, param, parameter_map(name, model, layers, experts)


def _tp(module: torch.nn.Module) -> tuple[int, int]:
    group = unwrap(module).tp_group
    return group.rank(), group.size()


def _checked(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise UserError(
            f"{name} has shape {tuple(tensor.shape)}, the model has {shape}; "
            "take the model config that belongs to these weights"
        )
    return tensor


def _select(tensors: list[Tensor], mapping: ParameterMap, rank: int, size: int) -> Tensor:
    whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors, mapping.dim)
    if mapping.index is None:
        return whole
    return whole.index_select(mapping.dim, mapping.index(rank, size).to(whole.device))


def _scatter(parts: list[Tensor], mapping: ParameterMap, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The inverse of `_select` over all ranks."""
    if mapping.index is None:
        whole = parts[0].clone() if len(mapping.names) > 1 else parts[0].reshape(shapes[mapping.names[0]]).clone()
    else:
        index = torch.cat([mapping.index(rank, len(parts)) for rank in range(len(parts))]).to(parts[0].device)
        joined = torch.cat(parts, mapping.dim)
        whole = torch.empty_like(joined).index_copy_(mapping.dim, index, joined)
    sizes = [shapes[name][mapping.dim] for name in mapping.names]
    pieces = whole.split(sizes, mapping.dim)
    return {name: piece.reshape(shapes[name]) for name, piece in zip(mapping.names, pieces, strict=True)}


def _gradient(param: torch.nn.Parameter) -> Tensor | None:
    main_grad = getattr(param, "main_grad", None)
    return param.grad if main_grad is None else main_grad.detach()


def initial_tensor(name: str, tensor: Canonical, model: ModelConfig, seed: int, device: torch.device) -> Tensor:
    """The initial value of one of `canonical_tensors`, float32 on `device`."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    value = torch.empty(tensor.shape, device=device)
    if tensor.init == NORMAL:
        return value.normal_(0.0, model.init_method_std, generator=generator)
    if tensor.init == DECAY:
        return value.uniform_(0.01, 16.0, generator=generator).log_()
    if tensor.init == TIME_STEP:
        # transformers starts dt_bias at 1, a placeholder for loaded weights: with A up to 16 the state then forgets
        # within a token. Yang et al. (arXiv 2412.06464) take Mamba-2's start.
        step = value.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        return step + torch.log(-torch.expm1(-step))
    return value.fill_(1.0 if tensor.init == ONES else 0.0)
