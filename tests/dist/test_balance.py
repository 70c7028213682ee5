"""The balancing loss of experts: a sample's, whatever pads its row, shares it, or computes it."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flagscale.models.qwen35 import language
from flagscale.models.qwen35.experts import BalancedRouter, SampleTokens
from flagscale.plan.plan import ExperimentPlan
from flagscale.train.step import TrainStep
from tests.dist.harness import SEQ, build_state, full_gradients, loss_weights, macro_batches, make_plan
from tests.dist.pool import run_ranks
from tests.dist.test_expert_gradients import MOE
from tests.dist.test_gradients import compare
from tests.dist.test_packing import MODES, SAMPLES, with_data

SIZE = 8
BATCH = {"global_batch_size": SIZE, "micro_batch_size": 1, "vision_micro_batch_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2ep2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2ep2": (2, {"expert_model_parallel_size": 2, "vision_micro_batch_size": 4}),
}


def one_process(**keys: Any) -> ExperimentPlan:
    return make_plan(1, **{**MOE, **BATCH, "micro_batch_size": 2, "vision_micro_batch_size": 4, **keys})


def steps(plans: list[ExperimentPlan]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Balancing losses of the world, and gradients of the first global batch, by each plan, from the same weights."""
    state = build_state(plans[0])
    found = []
    try:
        for plan in plans:
            own = dataclasses.replace(state, plan=plan)
            batches, weights = macro_batches(plan, SAMPLES, dist.get_rank()), loss_weights(plan, SAMPLES)
            report = TrainStep(own).accumulate(batches, weights)
            dist.all_reduce(report.balance_sum)
            found.append((float(report.balance_sum), full_gradients(own)))
    finally:
        state.topology.destroy()
    return found


def with_formula(plan: ExperimentPlan) -> tuple[float, float]:
    """The balancing loss of a step, and what transformers makes of the router's logits, sample by sample."""
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

    logits: list[tuple[bool, torch.Tensor]] = []
    gating = BalancedRouter.gating

    def recorded(router: BalancedRouter, hidden_SBD: torch.Tensor) -> torch.Tensor:
        logits_SBE = gating(router, hidden_SBD)
        logits.append((router.is_mtp_layer, logits_SBE.detach()))
        return logits_SBE

    with mock.patch.object(BalancedRouter, "gating", recorded):
        ((found, _),) = steps([plan])
    model, expected = plan.config.model, 0.0
    layers = model.num_layers + model.mtp_num_layers
    for number, (is_mtp, logits_SBE) in enumerate(logits):
        first = number // layers * plan.batch.micro_batch_size
        for row in range(plan.batch.micro_batch_size):
            tokens = SAMPLES.num_tokens(first + row) - is_mtp
            sample = logits_SBE[:tokens, row]
            expected += float(load_balancing_loss_func((sample,), model.num_experts, model.moe_router_topk))
    assert number + 1 == layers * SIZE // plan.batch.micro_batch_size
    return found, expected / model.moe_router_topk


def test_the_reported_value_is_transformers_own_of_each_sample() -> None:
    found, expected = run_ranks(1, with_formula, one_process(), timeout=240)[0]
    assert found == pytest.approx(expected, rel=1e-5)
    layers = MOE["num_layers"] + 1
    assert SIZE * layers < found < SIZE * layers * MOE["num_experts"] / MOE["moe_router_topk"]


def test_padding_does_not_count() -> None:
    """Longer rows, packed rows and the shortest ones have one loss and one gradient."""
    plans = [one_process(), one_process(seq_length=SEQ + 16), *(with_data(one_process(), **mode) for mode in MODES[1:])]
    (balance, gradients), *others = run_ranks(1, steps, plans, timeout=240)[0]
    for number, (other, found) in enumerate(others):
        assert other == pytest.approx(balance, rel=1e-5), number
        compare(found, gradients, str(number))


def counting_padding(plans: list[ExperimentPlan]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """`steps` with the rule broken: whole rows count."""
    of = SampleTokens.of
    whole = mock.Mock(of=lambda shape, num_tokens, lengths: of(shape, (), lengths))
    with mock.patch.object(language, "SampleTokens", whole):
        return steps(plans)


def test_counted_padding_is_seen() -> None:
    """Negative control of the test above."""
    plans = [one_process(), one_process(seq_length=SEQ + 16)]
    (balance, gradients), (other, found) = run_ranks(1, counting_padding, plans, timeout=240)[0]
    assert other != pytest.approx(balance, rel=1e-2)
    with pytest.raises(AssertionError, match=r"mlp\.gate\.weight"):
        compare(found, gradients, "longer rows")


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_and_padded_steps_agree_at_every_layout(name: str) -> None:
    world, keys = LAYOUTS[name]
    base = make_plan(world, **{**MOE, **BATCH, **keys})
    ((balance, gradients),) = run_ranks(1, steps, [one_process()], timeout=240)[0]
    plans = [with_data(base, **mode) for mode in (MODES[0], MODES[1], MODES[-1])]
    for number, (other, found) in enumerate(run_ranks(world, steps, plans, timeout=240)[0]):
        assert other == pytest.approx(balance, rel=1e-5), number
        compare(found, gradients, f"{name} {number}")
