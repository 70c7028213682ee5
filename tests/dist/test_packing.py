"""Packed and balanced steps give the loss and the gradients of padded ones, at any layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flagscale.data.macro import MacroBatch
from flagscale.plan.plan import ExperimentPlan
from flagscale.train.build import TrainState
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


FEW = {"global_batch_size": 4, "micro_batch_size": 2, "vision_micro_batch_size": 2}


def of_each_sample(plans: list[ExperimentPlan], weights: LossWeights) -> list[dict[int, tuple[list[float], Any]]]:
    """Losses and gradients of every sample of the first global batch by each plan: those of the step in which it alone
    has targets, the others lying beside it as always."""
    state = build_state(plans[0])
    found = []
    try:
        for plan in plans:
            own = dataclasses.replace(state, plan=plan)
            batches = macro_batches(plan, SAMPLES, dist.get_rank())
            samples = range(plan.batch.global_batch_size)
            found.append({sample: _of_one(own, batches, sample, weights) for sample in samples})
    finally:
        state.topology.destroy()
    return found


def _of_one(state: TrainState, batches: list[MacroBatch], sample: int, weights: LossWeights) -> tuple[list[float], Any]:
    report = TrainStep(state).accumulate([only(macro, sample) for macro in batches], weights)
    dist.all_reduce(report.loss_sums)
    return report.loss_sums.tolist(), full_gradients(state)


def only(macro: MacroBatch, sample: int) -> MacroBatch:
    """The macro batch with the targets of one sample."""
    texts = []
    for text in macro.microbatches:
        mask_BS = torch.zeros_like(text.loss_mask_BS)
        for number, row, tokens in text.spans():
            if number == sample:
                mask_BS[row, tokens] = text.loss_mask_BS[row, tokens]
        texts.append(dataclasses.replace(text, loss_mask_BS=mask_BS))
    return dataclasses.replace(macro, microbatches=tuple(texts))


def test_every_sample_has_the_loss_and_the_gradients_of_its_padded_row() -> None:
    """Alone with targets in the packed row, a sample gives what it gives in a row of its own: 1e-5 in fp32.

    A parameter's gradient is held against the largest of its module: near-zero ones (`A_log`, `dt_bias`) are rounding.
    """
    plans = [with_data(make_plan(1, **FEW), **mode) for mode in MODES]
    padded, *packed = run_ranks(1, of_each_sample, plans, loss_weights(plans[0], SAMPLES), timeout=240)[0]
    assert len(padded) == 4
    largest = max(float(gradient.norm()) for _, gradients in padded.values() for gradient in gradients.values())
    for mode, found in zip(MODES[1:], packed, strict=True):
        for sample, (sums, gradients) in found.items():
            assert sums == pytest.approx(padded[sample][0], rel=1e-5), (mode, sample)
            for name, gradient in gradients.items():
                expected = padded[sample][1][name]
                error = float((gradient - expected).norm())
                assert error <= 1e-5 * max(float(expected.norm()), 1e-2 * largest), (mode, sample, name)
    one, other = padded[0][1], padded[1][1]
    assert any((one[name] - other[name]).norm() > 0.1 * one[name].norm() for name in one), "samples differ"
