"""Both modules as the trainer gets them, and what their gradients still need."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from flagscale.config.schema import ModelConfig
from flagscale.models.qwen35.config import language_config, vision_config
from flagscale.models.qwen35.language import LanguageModel
from flagscale.models.qwen35.vision import VisionEncoder
from flagscale.models.qwen35.weights import init_weights, unwrap
from flagscale.plan.layout import Grid
from flagscale.platforms import Platform


def build_language(
    model: ModelConfig, grid: Grid, groups: ProcessGroupCollection, *, bf16: bool, platform: Platform
) -> LanguageModel:
    """This rank's part of the language model, initialised and frozen as configured."""
    config = language_config(model, grid=grid, bf16=bf16, platform=platform)
    return _finish(LanguageModel(model, config, groups), model, bf16, platform)


def build_vision(
    model: ModelConfig, grid: Grid, groups: ProcessGroupCollection, *, bf16: bool, platform: Platform
) -> VisionEncoder:
    """This rank's part of the vision encoder, initialised and frozen as configured."""
    config = vision_config(model, grid=grid, bf16=bf16, platform=platform)
    return _finish(VisionEncoder(model, config, groups), model, bf16, platform)


def freeze(module: torch.nn.Module, model: ModelConfig) -> None:
    """Applies `freeze_language`, `freeze_vision` (position table included) and `freeze_merger`."""
    inner = unwrap(module)
    for name, param in inner.named_parameters():
        if isinstance(inner, LanguageModel):
            frozen = model.freeze_language
        else:
            frozen = model.freeze_merger if name.startswith("merger.") else model.freeze_vision
        if frozen:
            param.requires_grad_(False)


def extra_tp_sum_params(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters whose gradient Megatron-Core's finalisation leaves without its sum over the tensor parallel group.

    The norm on the Gated DeltaNet output is replicated, but each rank applies it to its own heads. Upstream (0.19.2)
    sums it only with sequence parallelism; without, the copies drift apart (0.025 after two steps at lr 1e-2). Sum
    `main_grad` of these over the module's tensor parallel group once, after the last microbatch, next to
    `finalize_model_grads`.
    """
    inner = unwrap(module)
    if inner.tp_group.size() == 1 or inner.config.sequence_parallel:
        return []
    return [p for name, p in inner.named_parameters() if name.endswith("out_norm.weight") and p.requires_grad]


def tp_sum_params(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """All parameters whose gradient is a sum over the tensor parallel group, whoever does it.

    With `finalize_model_grads` only `extra_tp_sum_params` are left to do.
    """
    inner = unwrap(module)
    if inner.tp_group.size() == 1:
        return []
    per_head = ("q_layernorm.weight", "k_layernorm.weight", "out_norm.weight")
    return [
        p
        for name, p in inner.named_parameters()
        if p.requires_grad and (getattr(p, "sequence_parallel", False) or name.endswith(per_head))
    ]


def _finish[M: torch.nn.Module](module: M, model: ModelConfig, bf16: bool, platform: Platform) -> M:
    module.to(device=platform.device, dtype=torch.bfloat16 if bf16 else torch.float32)
    init_weights(module, model, model.seed)
    freeze(module, model)
    return module
