"""One optimizer over modules with different grids: a distributed optimizer each, one norm, one decision.

Megatron-Core's own MimoOptimizer takes one all-reduce a module and three more for overflow, norm and success. Here
every rank contributes the squared norm of the gradient shards it owns, each parameter counted once whatever its grid,
and one all-reduce over the world carries both norms and the step's metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection

from flagscale.config.errors import ConfigError
from flagscale.config.schema import Config
from flagscale.config.schema import OptimizerConfig as OptimizerKeys
from flagscale.models.qwen35.weights import canonical_names, canonical_shapes
from flagscale.plan.layout import LANGUAGE, VISION


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What one optimizer step did.

    Attributes:
        skipped: a gradient was not finite, so no parameter was changed on any rank.
        grad_norm: L2 norm over both modules, before clipping.
        grad_norms: L2 norm of each module.
        sums: the caller's numbers, summed over the world.
        local: what this rank added to the sums over the world, on its device: the squared norms of vision, language
            and what others count, then the caller's numbers.
    """

    skipped: bool
    grad_norm: float
    grad_norms: dict[str, float]
    sums: list[float]
    local: torch.Tensor = field(compare=False)


class JointOptimizer:
    """The optimizers of the modules that have trainable parameters, stepped together."""

    def __init__(self, optimizers: dict[str, MegatronOptimizer], clip_grad: float) -> None:
        self.optimizers = optimizers
        self._clip_grad = clip_grad

    @property
    def param_groups(self) -> list[dict]:
        """Parameter groups of all modules, for the learning-rate schedule."""
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        """Forgets the gradients of the optimizers' own parameter shards."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    @torch.no_grad()
    def step(self, local_sums: torch.Tensor) -> StepOutcome:
        """Clips by the global norm and updates, or skips everywhere. Collective over the world.

        Args:
            local_sums: numbers of this rank to be summed over the world along with the norms, 1-D float32.
        """
        for optimizer in self.optimizers.values():
            optimizer.prepare_grads()
        vision, language = (self._local_squares(name, local_sums.device) for name in (VISION, LANGUAGE))
        local = torch.cat([torch.stack([vision[0], language[0], vision[1] + language[1]]), local_sums])
        total = local.clone()
        dist.all_reduce(total)
        vision_square, language_square, uncounted_square, *sums = total.tolist()
        norm = math.sqrt(vision_square + language_square) if vision_square + language_square >= 0 else math.nan
        norms = {VISION: math.sqrt(max(vision_square, 0.0)), LANGUAGE: math.sqrt(max(language_square, 0.0))}
        skipped = not math.isfinite(norm + uncounted_square)
        if not skipped:
            for optimizer in self.optimizers.values():
                self._clip(optimizer, norm)
                optimizer.step_with_ready_grads()
        return StepOutcome(skipped=skipped, grad_norm=norm, grad_norms=norms, sums=sums, local=local)

    def _local_squares(self, name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared norms of the gradient shards of one module on this rank: those it counts, and those its twins count.

        The latter are not part of the norm, but a value that is not finite among them must stop the step as well.
        """
        counted, uncounted = (torch.zeros((), dtype=torch.float32, device=device) for _ in range(2))
        for part in self.optimizers[name].chained_optimizers if name in self.optimizers else ():
            own = [gradient for gradient in part.get_grads_for_grad_norm() if gradient.numel()]
            places = {gradient.data_ptr() for gradient in own}
            gradients = [p.grad for p in part.get_parameters() if p.grad is not None and p.grad.numel()]
            counted += _square(own)
            uncounted += _square([gradient for gradient in gradients if gradient.data_ptr() not in places])
        return counted, uncounted

    def _clip(self, optimizer: MegatronOptimizer, norm: float) -> None:
        parameters = optimizer.get_parameters()
        if self._clip_grad > 0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=self._clip_grad, total_norm=norm)


def _square(gradients: list[torch.Tensor]) -> torch.Tensor | float:
    """Squared norm of several tensors together."""
    return torch.stack(torch._foreach_norm(gradients)).square().sum() if gradients else 0.0


def build_optimizer(
    config: Config, modules: dict[str, DistributedDataParallel], groups: dict[str, ProcessGroupCollection],
    trainable: tuple[str, ...],
) -> JointOptimizer:  # fmt: skip
    """Makes a distributed optimizer for each module in `trainable`. Collective over the world.

    Args:
        modules: the wrapped modules this rank holds.
        trainable: names of the modules with trainable parameters, the same on every rank.

    Raises:
        ConfigError: `no_weight_decay` names nothing, or only a part of a parameter.
    """
    _check_names(config)
    keys = config.model.optimizer
    optimizers = {}
    for name in trainable:
        if name in modules:
            optimizers[name] = get_megatron_optimizer(
                _megatron_config(config),
                [modules[name]],
                config_overrides=_overrides(config, name, modules[name]),
                use_gloo_process_groups=False,
                pg_collection=groups[name],
            )
        else:
            # Megatron-Core agrees on the parameter groups over the whole world, once for dense and once for expert
            # parameters; a rank outside this module's grid has none, and takes part with an empty list.
            for _ in range(2):
                dist.all_gather_object([None] * dist.get_world_size(), [])
    return JointOptimizer(optimizers, keys.clip_grad)


def build_scheduler(config: Config, optimizer: JointOptimizer) -> OptimizerParamScheduler:
    """Megatron-Core's learning-rate schedule; its step is one iteration."""
    keys = config.model.optimizer
    decay_iters = keys.lr_decay_iters or max(config.model.train_iters, keys.lr_warmup_iters + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=keys.lr,
        min_lr=keys.min_lr,
        lr_warmup_steps=keys.lr_warmup_iters,
        lr_decay_steps=decay_iters,
        lr_decay_style=keys.lr_decay_style,
        start_wd=keys.weight_decay,
        end_wd=keys.weight_decay,
        wd_incr_steps=config.model.train_iters,
        wd_incr_style="constant",
    )


def _megatron_config(config: Config) -> OptimizerConfig:
    keys = config.model.optimizer
    return OptimizerConfig(
        optimizer="adam",
        lr=keys.lr,
        min_lr=keys.min_lr,
        weight_decay=keys.weight_decay,
        adam_beta1=keys.adam_beta1,
        adam_beta2=keys.adam_beta2,
        adam_eps=keys.adam_eps,
        clip_grad=0.0,  # clipping is ours, by the norm over both modules
        bf16=config.system.bf16,
        params_dtype=torch.bfloat16 if config.system.bf16 else torch.float32,
        use_distributed_optimizer=True,
    )


def _overrides(config: Config, name: str, module: torch.nn.Module) -> dict[ParamKey, dict[str, float]]:
    """What sets parameters apart: no weight decay, and the learning-rate factors of the vision encoder's parts."""
    keys, without = config.model.optimizer, _without_decay(config, module)
    undecayed = _where("no_weight_decay", lambda p, n: p in without)
    overrides: dict[ParamKey, dict[str, float]] = {undecayed: {"wd_mult": 0.0}}
    if name == VISION:
        for part, factor in (("encoder", keys.vision_lr_mult), ("merger", keys.merger_lr_mult)):
            inside = _where(part, lambda p, n, part=part: ("merger." in n) == (part == "merger"))
            if factor != 1.0:
                overrides[inside] = {"max_lr": keys.lr * factor, "min_lr": keys.min_lr * factor}
    return overrides


def _where(name: str, matches: Callable[..., bool]) -> ParamKey:
    return ParamKey(with_name_predicate=ParamWithNamePredicate(name=name, fn=matches))


def _check_names(config: Config) -> None:
    """Every pattern names something in the whole model, whatever this rank holds of it."""
    names = canonical_shapes(config.model)
    # The default also names parts that this model may lack, such as Gated DeltaNet.
    for pattern in set(config.model.optimizer.no_weight_decay) - set(OptimizerKeys().no_weight_decay):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                "model.optimizer.no_weight_decay", pattern, "matches no parameter", f"names are such as {min(names)}"
            )


def _without_decay(config: Config, module: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The parameters that `no_weight_decay` names; those that join several tensors have to be named whole."""
    without = set()
    for parameter, names in canonical_names(module, config.model).items():
        named = [
            name
            for name in names
            if any(fnmatchcase(name, pattern) for pattern in config.model.optimizer.no_weight_decay)
        ]
        if named and len(named) < len(names):
            raise ConfigError(
                "model.optimizer.no_weight_decay",
                named[0],
                "is trained as one parameter with " + ", ".join(sorted(set(names) - set(named))),
                "name all of them or none",
            )
        if named:
            without.add(parameter)
    return without
