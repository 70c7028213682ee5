"""Gradients and steps with reduction and gathering beside computation equal those without, in many small buckets."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flagscale.data.text import TextBatch
from flagscale.models.qwen35.language import VisualRows
from flagscale.plan.layout import LANGUAGE, VISION
from flagscale.plan.plan import ExperimentPlan
from flagscale.train import step as step_module
from flagscale.train import vision as vision_module
from flagscale.train.build import TrainState
from flagscale.train.evaluate import evaluate
from flagscale.train.graphs import MicrobatchLoss
from flagscale.train.overlap import start_gather
from flagscale.train.step import TrainStep
from tests.dist.harness import (
    HeldOut,
    Samples,
    build_state,
    full_gradients,
    full_parameters,
    loss_weights,
    macro_batches,
    make_plan,
)
from tests.dist.pool import RankFailure, RankTimeout, run_ranks
from tests.dist.test_gradients import FROZEN, LAYOUTS, batch_keys, compare, mostly_long
from tests.dist.test_optimizer import KEYS

BUCKET = 2000  # parameters; some ten buckets a module
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": BUCKET}
LIMIT = 280  # s
STEPS = 3  # Megatron-Core learns in the first how often a gradient arrives, and reduces at its end

# At most one image a sample, so that in the first and in the last macro batch of some steps some ranks have nothing.
SAMPLES = Samples(seed=1, images=(1,), without_images=(*range(6), 21, 22, 23, 44, 45, *range(65, 72)))

Buckets = dict[str, tuple[int, int]]
"""By module: how many buckets it has, and those whose reduction had begun."""


@dataclasses.dataclass
class Trained:
    """Of every step the gradients, on rank 0, what had begun before they were finalised, and how many items each
    encoder had in each macro batch; all parameters.

    The optimizer's epsilon is above the gradients (`KEYS`), so that rounding does not turn an update over.
    """

    start: dict[str, torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]
    begun: list[Buckets]
    items: list[list[list[int]]]
    parameters: dict[str, torch.Tensor]


def plan_of(name: str, factor: int, *, overlap: bool, **model: Any) -> ExperimentPlan:
    """A layout at a factor."""
    world, keys = LAYOUTS[name]
    plan = make_plan(world, **keys, **model, **batch_keys(world, keys, factor), optimizer=KEYS)
    system = dataclasses.replace(plan.config.system, **(OVERLAP if overlap else {}))
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, system=system))


def trained(plan: ExperimentPlan, graphed: bool = False) -> Trained:
    """Steps on a rank of the pool; `graphed`: with the language model behind what stands in for a CUDA graph."""
    state = build_state(plan)
    found = Trained(full_parameters(state), [], [], [], {})
    finalize = step_module.finalize_gradients

    def noting_finalize(state: TrainState) -> None:
        found.begun.append(begun(state))
        finalize(state)

    try:
        step = TrainStep(state)
        if graphed:
            step.language._graph = NoHooks(step.language._loss_of, state.modules[LANGUAGE])
        for n in range(STEPS):
            with mock.patch.object(step_module, "finalize_gradients", noting_finalize):
                batches = macro_batches(plan, SAMPLES, dist.get_rank(), n)
                report = step.accumulate(batches, loss_weights(plan, SAMPLES, n))
            found.gradients.append(full_gradients(state))
            found.items.append([[len(items) for items in batch.spec.encode] for batch in batches])
            state.optimizer.step(report.loss_sums)
            start_gather(state.wrapped.values())
        state.finish_gathers()
        found.parameters = full_parameters(state)
        return found
    finally:
        state.topology.destroy()


def begun(state: TrainState) -> Buckets:
    """What has begun on this rank."""
    groups = {
        name: (*module.bucket_groups, *module.expert_parallel_bucket_groups) for name, module in state.wrapped.items()
    }
    return {name: (len(own), sum(g.grad_reduce_handle is not None for g in own)) for name, own in groups.items()}


class NoHooks:
    """Stands in for a CUDA graph: the same sums and gradients, and no hook of Megatron-Core is called.

    Args:
        loss: as MicrobatchGraph's.
        model: the wrapped model.
    """

    def __init__(self, loss: MicrobatchLoss, model: torch.nn.Module) -> None:
        self._loss, self._model = loss, model

    def run(self, batch: TextBatch, rows: VisualRows, weights: torch.Tensor) -> torch.Tensor:
        """Forward and backward of a microbatch."""
        with mock.patch.object(type(self._model.bucket_groups[0]), "register_grad_ready"):
            loss, sums = self._loss(batch, rows, weights)
            loss.backward()
        return sums


def check(name: str, factor: int, *, graphed: bool = False, **model: Any) -> None:
    """The same gradients in every step and the same parameters after them."""
    world = LAYOUTS[name][0]
    expected = run_ranks(world, trained, plan_of(name, factor, overlap=False, **model), timeout=LIMIT)
    found = run_ranks(world, trained, plan_of(name, factor, overlap=True, **model), graphed, timeout=LIMIT)
    equal_gradients(found[0], expected[0], f"{name} factor {factor}")
    for key, value in expected[0].parameters.items():
        moved, error = (value - expected[0].start[key]).norm(), (found[0].parameters[key] - value).norm()
        assert error <= 1e-3 * moved + 1e-6 * value.norm(), f"{key}: off by {error:.2e} after a way of {moved:.2e}"
    some_have_nothing = any(0 in step[-1] for step in found[0].items)
    assert some_have_nothing or len(found[0].items[0][0]) == 1, "the samples do not test a rank without items"
    for plain, overlapped in zip(expected, found, strict=True):
        assert not any(started for step in plain.begun for _, started in step.values())
        for n, step in enumerate(overlapped.begun):
            for module, (count, started) in step.items():
                early = n > 0 or (graphed and module == LANGUAGE)
                assert started == (count if early else 0), f"{module} in step {n}"
    # A later pipeline stage reduces everything at once, as Megatron-Core has it.
    assert all(max(count for count, _ in overlapped.begun[0].values()) > 4 for overlapped in found[:1])


CI = ["vit_dp4-llm_tp2dp2-sp", "vit_dp4-llm_tp2pp2"]


@pytest.mark.parametrize("name", mostly_long(CI, sorted(LAYOUTS.keys() - CI)))
def test_overlap_changes_nothing(name: str) -> None:
    """Colocated and unified, with pipeline stages, with ranks that encode nothing in the last macro batch."""
    check(name, 1 if "unified" in name or "dp3" in name else 2)


@pytest.mark.parametrize("factor", mostly_long([4], [1, 5]))
def test_a_replayed_model_is_reduced_before_the_encoders_backward(factor: int) -> None:
    check("vit_dp4-llm_tp2dp2", factor, graphed=True)


@pytest.mark.parametrize(
    "keys",
    [
        {"vision_recompute": True},
        pytest.param(FROZEN["vision"], marks=pytest.mark.long),
        pytest.param(FROZEN["encoder"], marks=pytest.mark.long),
        pytest.param(FROZEN["language"], marks=pytest.mark.long),
        pytest.param({"untie_embeddings_and_output_weights": True}, marks=pytest.mark.long),
    ],
    ids=lambda keys: "-".join(keys),
)
def test_with_recomputation_and_frozen_parts(keys: dict[str, Any]) -> None:
    check("vit_dp4-llm_tp2dp2", 4, **keys)


def pending_when_called(plan: ExperimentPlan) -> dict[str, list[str]]:
    """Modules that were called, in a validation and in a step right after an optimizer step each, with " early" where
    parameters of theirs were still on their way. Runs on a rank of the pool."""
    state = build_state(plan)
    found: dict[str, list[str]] = {}
    called: list[str] = []

    def pending(name: str) -> bool:
        module = state.wrapped[name]
        groups = (*module.bucket_groups, *module.expert_parallel_bucket_groups)
        return any(group.param_gather_handle is not None for group in groups)

    def note(name: str) -> None:
        called.append(name + " early" * pending(name))

    try:
        for name, module in state.raw.items():
            module.register_forward_pre_hook(lambda *_, name=name: note(name))
        step = TrainStep(state)
        for n, action in enumerate(("validation", "step")):
            step.run(macro_batches(plan, SAMPLES, dist.get_rank(), n), loss_weights(plan, SAMPLES, n))
            assert all(map(pending, state.wrapped)), "nothing is on its way"
            called.clear()
            if action == "validation":
                evaluate(state, step, HeldOut(plan, SAMPLES, plan.batch.global_batch_size), 1)
            else:
                step.accumulate(macro_batches(plan, SAMPLES, dist.get_rank(), n), loss_weights(plan, SAMPLES, n))
            found[action] = sorted(set(called))
        return found
    finally:
        state.topology.destroy()


def test_a_module_is_called_when_its_parameters_have_arrived() -> None:
    """In a validation too, which may follow any step."""
    plan = plan_of("vit_dp4-llm_tp2dp2", 2, overlap=True)
    expected = {action: sorted((LANGUAGE, VISION)) for action in ("validation", "step")}
    assert run_ranks(4, pending_when_called, plan) == [expected] * 4


BROKEN = {
    "absent": (vision_module, "reduces_early", lambda encoder: False),
    "early encoder": (vision_module, "held_back", lambda *_, **__: nullcontext()),
}


def broken(plan: ExperimentPlan, rule: str) -> Trained:
    """The steps with a rule broken on purpose."""
    module, name, value = BROKEN[rule]
    with mock.patch.object(module, name, value):
        return trained(plan)


@pytest.mark.long
@pytest.mark.parametrize("rule", BROKEN)
def test_rules_are_needed(rule: str) -> None:
    """Negative controls: a rank without items that stays away; an encoder's reductions before the last macro batch.

    The language model has as many microbatches in every step; Megatron-Core, which counts gradients, then needs no rule
    unless a graph replays them.
    """
    name = "vit_dp4-llm_tp2dp2"
    expected = run_ranks(4, trained, plan_of(name, 2, overlap=False))[0]
    with pytest.raises((RankFailure, RankTimeout, AssertionError)):
        equal_gradients(run_ranks(4, broken, plan_of(name, 2, overlap=True), rule, timeout=60)[0], expected, name)


def equal_gradients(found: Trained, expected: Trained, label: str) -> None:
    for n in range(STEPS):
        compare(found.gradients[n], expected.gradients[n], f"{label} step {n}")
