"""Writes what the CPU path computes, for the GPU tests to compare with: `python -m tests.gpu.reference FILE`.

A process of its own, because the CPU platform redirects torch.cuda for the whole process.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from flagscale.models.qwen35.weights import gather_canonical, load_canonical
from flagscale.plan.layout import LANGUAGE, VISION
from flagscale.plan.plan import ExperimentPlan
from flagscale.platforms import get_platform
from flagscale.train.build import TrainState, build
from flagscale.train.step import TrainStep
from tests.dist.harness import Samples, loss_weights, macro_batches, make_plan

KEYS: dict[str, Any] = {
    # Head dimensions of the real models, which kernels are chosen by; everything else small.
    "num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 256, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "rotary_percent": 0.25, "mrope_section": [11, 11, 10], "vision_num_layers": 2,
    "vision_hidden_size": 256, "vision_ffn_hidden_size": 512, "vision_num_attention_heads": 4,
    "global_batch_size": 8, "micro_batch_size": 2, "vision_micro_batch_size": 4, "init_method_std": 0.05,
}  # fmt: skip
SAMPLES = Samples(seed=3)


def start(platform: str) -> Any:
    """One process as a world of its own, on a platform."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    chosen = get_platform(platform)
    chosen.install()
    dist.init_process_group(chosen.backend, store=dist.HashStore(), rank=0, world_size=1)
    return chosen


def whole(state: TrainState, what: str) -> dict[str, torch.Tensor]:
    """Parameters or gradients of both modules by name, fp32 on the host."""
    model = state.plan.config.model
    found: dict[str, torch.Tensor] = {}
    for name in (VISION, LANGUAGE):
        found |= gather_canonical(state.raw[name], model, what)
    return {name: tensor.detach().float().cpu() for name, tensor in found.items()}


def step(state: TrainState) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Loss sums and gradients of one step from the state's weights, without an update."""
    report = TrainStep(state).accumulate(macro_batches(state.plan, SAMPLES, 0), loss_weights(state.plan, SAMPLES))
    return report.loss_sums.tolist(), whole(state, "grad")


def load_weights(state: TrainState, weights: dict[str, torch.Tensor]) -> None:
    """Gives both modules, and the optimizers' master copies, these weights."""
    for name in (VISION, LANGUAGE):
        load_canonical(state.raw[name], state.plan.config.model, weights.__getitem__)
    for optimizer in state.optimizer.optimizers.values():
        optimizer.reload_model_params()


def make_reference_plan(**keys: Any) -> ExperimentPlan:
    """The plan of both sides, with these system keys."""
    made = make_plan(1, **KEYS)
    system = dataclasses.replace(made.config.system, **keys)
    return dataclasses.replace(made, config=dataclasses.replace(made.config, system=system))


def errors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """|g - g_ref| / |g_ref| by parameter, without those whose gradients are next to nothing."""
    total = torch.stack([g.norm() for g in wanted.values()]).norm()
    return {name: ((found[name] - g).norm() / g.norm()).item() for name, g in wanted.items() if g.norm() > 1e-3 * total}


def main() -> int:
    """Writes weights, loss sums and gradients in fp32, and how far bf16 on the CPU is from these."""
    platform = start("cpu")
    state = build(make_reference_plan(), platform)
    weights = whole(state, "param")
    sums, gradients = step(state)
    state.topology.destroy()
    rounded = build(make_reference_plan(bf16=True), platform)
    load_weights(rounded, weights)
    bf16_errors = errors(step(rounded)[1], gradients)
    torch.save({"weights": weights, "sums": sums, "gradients": gradients, "bf16_errors": bf16_errors}, sys.argv[1])
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
