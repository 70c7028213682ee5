"""Builds what training needs, as one list of named steps: topology, modules, wrappers, optimizer, schedule."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config

from flagscale.config.schema import ModelConfig
from flagscale.models.qwen35.build import build_language, build_vision
from flagscale.parallel.groups import Topology
from flagscale.plan.layout import LANGUAGE, VISION
from flagscale.plan.plan import ExperimentPlan
from flagscale.platforms import Platform
from flagscale.train.checkpoint import Checkpoints
from flagscale.train.optimizer import JointOptimizer, build_optimizer, build_scheduler
from flagscale.train.overlap import ddp_config, finish_gather
from flagscale.train.place import Place
from flagscale.train.pretrained import load_pretrained


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """Everything an iteration touches on this rank.

    Attributes:
        raw: the modules this rank holds, unwrapped.
        modules: the same, wrapped for gradient reduction where they train.
        wrapped: those of `modules` that are wrapped.
        place: what this rank is doing, for messages.
    """

    plan: ExperimentPlan
    platform: Platform
    topology: Topology
    raw: dict[str, torch.nn.Module]
    modules: dict[str, torch.nn.Module]
    wrapped: dict[str, DistributedDataParallel]
    optimizer: JointOptimizer
    scheduler: OptimizerParamScheduler
    place: Place

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of both modules."""
        return torch.bfloat16 if self.plan.config.system.bf16 else torch.float32

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 FLOP/s of a rank's device: `system.peak_tflops`, else the vendor's figure, None where unknown."""
        given = self.plan.config.system.peak_tflops
        return self.platform.peak_flops if given is None else 1e12 * given

    def finish_gathers(self) -> None:
        """Makes whatever reads parameters next see the updated ones."""
        for module in self.wrapped.values():
            finish_gather(module)


def build(plan: ExperimentPlan, platform: Platform, place: Place | None = None) -> TrainState:
    """Builds the training state. Collective over the world."""
    config = plan.config
    topology = Topology.build(plan.modules, config.model.seed)
    try:
        raw = _build_modules(plan, platform, topology)
        keys = config.system.checkpoint
        if keys.pretrained is not None and Checkpoints(plan.exp_dir / "checkpoints", keys.keep).newest() is None:
            load_pretrained(raw, topology.groups, config.model, Path(keys.pretrained))
        names = trainable_modules(config.model)
        ddp = ddp_config(config.system, platform)
        if config.system.gradient_accumulation_fusion:
            for module in raw.values():
                fuse_gradient_accumulation(module)
        wrapped = {name: _wrap(module, topology, name, ddp) for name, module in raw.items() if name in names}
        optimizer = build_optimizer(config, wrapped, topology.groups, names)
    except BaseException:
        topology.destroy()
        raise
    return TrainState(
        plan=plan,
        platform=platform,
        topology=topology,
        raw=raw,
        modules={**raw, **wrapped},
        wrapped=wrapped,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        place=place or Place(),
    )


def trainable_modules(model: ModelConfig) -> tuple[str, ...]:
    """Modules with at least one trainable parameter; the same on every rank."""
    trains = {VISION: not (model.freeze_vision and model.freeze_merger), LANGUAGE: not model.freeze_language}
    return tuple(name for name, any_part in trains.items() if any_part)


def _build_modules(plan: ExperimentPlan, platform: Platform, topology: Topology) -> dict[str, torch.nn.Module]:
    """The modules this rank holds, on its device, initialised, with frozen parts marked."""
    config, builders = plan.config, {VISION: build_vision, LANGUAGE: build_language}
    return {
        name: builders[name](config.model, plan.modules[name], groups, bf16=config.system.bf16, platform=platform)
        for name, groups in topology.groups.items()
    }


def fuse_gradient_accumulation(module: torch.nn.Module) -> None:
    """Lets the linears of Transformer Engine add weight gradients to `main_grad` in the matrix product that makes them.

    Megatron-Core's key for it also wants a kernel of Apex for the output layer, which stays as it is here.
    """
    for part in module.modules():
        if hasattr(part, "fuse_wgrad_accumulation"):
            part.fuse_wgrad_accumulation = True


def _wrap(
    module: torch.nn.Module, topology: Topology, name: str, ddp: DistributedDataParallelConfig
) -> DistributedDataParallel:
    """Megatron-Core's gradient buffers and reduction, over the module's own data parallel group."""
    # A copy: Megatron-Core writes this group's bucket size into it.
    wrapped = DistributedDataParallel(
        get_model_config(module), dataclasses.replace(ddp), module, pg_collection=topology.groups[name]
    )
    if ddp.overlap_param_gather:
        wrapped.disable_forward_pre_hook(param_sync=False)  # `overlap.finish_gather` waits instead
    return wrapped
