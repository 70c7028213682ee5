"""A model with experts, colocated: gradients equal those of a single process, the balancing loss included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from flagscale.plan.layout import LANGUAGE
from flagscale.plan.plan import ExperimentPlan
from flagscale.train.step import TrainStep
from tests.dist.harness import build_state, full_gradients, full_parameters, loss_weights, macro_batches, make_plan
from tests.dist.pool import run_ranks
from tests.dist.test_gradients import MIXED, batch_keys, compare, reference

MOE = {
    "ffn_hidden_size": 0, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16, "moe_aux_loss_coeff": 0.3, "num_layers": 2, "full_attention_interval": 2,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "llm_tp2dp2ep2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
    "llm_tp2dp2ep4": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 4},
    "llm_tp2dp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "llm_dp2pp2ep2": {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "unified_tp2dp2ep2": {
        "use_mimo": False, "tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2,
    },
}  # fmt: skip


def one_step(plan: ExperimentPlan) -> dict[str, Any]:
    """Gradients before clipping, the norm, and the parameters after the step, on rank 0. Runs on a rank of the pool."""
    state = build_state(plan)
    try:
        step = TrainStep(state)
        batches, weights = macro_batches(plan, MIXED, dist.get_rank()), loss_weights(plan, MIXED)
        step.accumulate(batches, weights)
        gradients = full_gradients(state)
        report = step.run(batches, weights)
        norm = report.outcome.grad_norms[LANGUAGE]
        return {"gradients": gradients, "norm": norm, "parameters": full_parameters(state)}
    finally:
        state.topology.destroy()


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_norm_and_step_equal_the_single_process(name: str) -> None:
    keys = {**LAYOUTS[name], **MOE}
    found = run_ranks(4, one_step, make_plan(4, **keys, **batch_keys(4, keys, 2)), timeout=240)[0]
    expected = reference(MIXED, **MOE)
    compare(found["gradients"], expected, name)
    language = [gradient.norm() for key, gradient in expected.items() if not key.startswith("model.visual.")]
    assert found["norm"] == pytest.approx(float(torch.stack(language).norm()), rel=1e-4)
    assert all(value.isfinite().all() for value in found["parameters"].values())


def test_the_balancing_loss_is_in_the_gradients() -> None:
    """Without it the router's gradients are others, so that the comparison above is one of both."""
    router = "model.language_model.layers.0.mlp.gate.weight"
    with_loss, without = reference(MIXED, **MOE), reference(MIXED, **{**MOE, "moe_aux_loss_coeff": 0.0})
    assert (with_loss[router] - without[router]).norm() > 0.05 * without[router].norm()


def backward_then_step(plan: ExperimentPlan) -> float:
    """The balancing loss's gradient outside of a schedule, with one model; then a step with another."""
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # as in a new process
    state = build_state(plan)
    value = torch.ones(1, requires_grad=True)
    MoEAuxLossAutoScaler.apply(torch.ones(1, requires_grad=True), value).sum().backward()
    state.topology.destroy()
    return float(one_step(plan)["norm"])


def test_a_later_model_takes_its_own_scale_of_the_balancing_loss() -> None:
    plan = make_plan(1, **MOE, **batch_keys(1, MOE, 2))
    alone, after = run_ranks(1, one_step, plan)[0]["norm"], run_ranks(1, backward_then_step, plan)[0]
    assert after == pytest.approx(alone, rel=1e-6)
