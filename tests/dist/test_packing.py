"""Packed and balanced steps give the loss and the gradients of padded ones, at any layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flagscale.plan.plan import ExperimentPlan
from flagscale.train.language import LossWeights
from flagscale.train.step import TrainStep
from tests.dist.harness import Samples, build_state, full_gradients, loss_weights, macro_batches, make_plan
from tests.dist.pool import run_ranks
from tests.dist.test_gradients import compare

SAMPLES = Samples(seed=3, without_images=(0, 1, 9))
BATCH = {"global_batch_size": 24, "micro_batch_size": 2, "vision_micro_batch_size": 4}
MODES: list[dict[str, Any]] = [
    {},
    {"packing": "in_batch"},
    {"packing": "in_batch", "language_balance": True},
    {"packing": "length_budget"},
    {"packing": "length_budget", "language_balance": True},
]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_dp4-llm_tp2dp2-sp": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "vit_dp2-llm_pp2": (2, {"pipeline_model_parallel_size": 2}),
    "vit_tp2-llm_dp2": (2, {"vision_tensor_model_parallel_size": 2, "vision_micro_batch_size": 8}),
}


def with_data(plan: ExperimentPlan, **data: Any) -> ExperimentPlan:
    """The plan with other keys of `data`."""
    config = dataclasses.replace(plan.config, data=dataclasses.replace(plan.config.data, **data))
    return dataclasses.replace(plan, config=config)


def steps(plans: list[ExperimentPlan], weights: LossWeights) -> list[tuple[list[float], int, dict[str, torch.Tensor]]]:
    """Loss sums over the world, tokens computed, and gradients of the first global batch by each plan."""
    state = build_state(plans[0])
    found = []
    try:
        for plan in plans:
            own = dataclasses.replace(state, plan=plan)
            report = TrainStep(own).accumulate(macro_batches(plan, SAMPLES, dist.get_rank()), weights)
            dist.all_reduce(report.loss_sums)
            found.append((report.loss_sums.tolist(), report.num_computed, full_gradients(own)))
    finally:
        state.topology.destroy()
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_steps_equal_padded_ones(name: str) -> None:
    """Loss to 1e-5, every parameter's gradient as close as the layouts are to each other."""
    world, keys = LAYOUTS[name]
    plans = [with_data(make_plan(world, **{**BATCH, **keys}), **mode) for mode in MODES]
    padded, *packed = run_ranks(world, steps, plans, loss_weights(plans[0], SAMPLES), timeout=240)[0]
    for mode, (sums, num_computed, gradients) in zip(MODES[1:], packed, strict=True):
        assert sums == pytest.approx(padded[0], rel=1e-5), mode
        assert num_computed < 0.8 * padded[1], mode
        compare(gradients, padded[2], str(mode))
