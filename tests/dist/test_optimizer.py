"""One optimizer over both modules: norm, clipping, skipped steps, learning-rate factors and weight decay."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import optimizer as megatron_optimizer

from flagscale.config.errors import UserError
from flagscale.config.schema import OptimizerConfig
from flagscale.plan.layout import LANGUAGE, VISION
from flagscale.plan.plan import ExperimentPlan
from flagscale.train import step as step_module
from flagscale.train.build import TrainState
from flagscale.train.optimizer import StepOutcome
from flagscale.train.step import TrainStep
from tests.dist.harness import build_state, full_parameters, loss_weights, macro_batches, make_plan
from tests.dist.pool import run_ranks
from tests.dist.test_gradients import FROZEN, LAYOUTS, MIXED, batch_keys, model_keys, mostly_long

STEPS = 3
# Adam's first steps are lr * sign(g), which rounding turns over where a gradient is near zero; an epsilon above the
# clipped gradients makes an update proportional to its gradient. clip_grad is far below the norm, so that it counts.
KEYS = OptimizerConfig(lr=1e-3, lr_decay_style="constant", adam_eps=1e-2, clip_grad=0.5, weight_decay=0.1)
NORM = 1e-5
NORM_LATER = (
    1e-4  # a parameter near 1 is rounded by 6e-8 in an update, and this model's gradients change 250 times as much
)

Trained = tuple[list[StepOutcome], dict[str, torch.Tensor]]


def trained(plan: ExperimentPlan, steps: int = STEPS) -> Trained:
    """Outcomes of the first steps, and the parameters after them on rank 0. Runs on a rank of the pool."""
    state = build_state(plan)
    try:
        outcomes = [one_step(state, n) for n in range(steps)]
        return outcomes, full_parameters(state)
    finally:
        state.topology.destroy()


def one_step(state: TrainState, n: int) -> StepOutcome:
    """Step number n on the mixed samples."""
    batches = macro_batches(state.plan, MIXED, dist.get_rank(), n)
    report = TrainStep(state).run(batches, loss_weights(state.plan, MIXED, n))
    assert report.outcome is not None
    return report.outcome


def plan_of(name: str, optimizer: OptimizerConfig = KEYS, **model: Any) -> ExperimentPlan:
    """Factor 2 (1 when unified) at a layout."""
    world, keys = LAYOUTS[name]
    return make_plan(world, **keys, **model, optimizer=optimizer, **batch_keys(world, keys, 2))


def single(optimizer: OptimizerConfig = KEYS, **model: Any) -> ExperimentPlan:
    """The same batch in one process."""
    batch = {"global_batch_size": 24, "micro_batch_size": 3, "vision_micro_batch_size": 6}
    return make_plan(1, **batch, **model, optimizer=optimizer)


@cache
def reference(steps: int = STEPS, **model: Any) -> Trained:
    """What the single process does."""
    return run_ranks(1, trained, single(**model), steps)[0]


CI = [
    "vit_dp4-llm_tp2dp2-sp", "vit_dp4-llm_tp2pp2", "vit_tp2dp2-llm_dp4", "vit_dp6-llm_tp2dp3", "unified-tp2pp2",
]  # fmt: skip


@pytest.mark.parametrize("name", mostly_long(CI, sorted(LAYOUTS.keys() - CI)))
def test_steps_equal_the_single_process(name: str) -> None:
    """One norm over both modules, one clip coefficient, the same parameters after three steps."""
    ranks = run_ranks(LAYOUTS[name][0], trained, plan_of(name), timeout=120)
    outcomes, parameters = ranks[0]
    assert all(found[0] == outcomes for found in ranks), "ranks disagree on an outcome"
    expected, expected_parameters = reference(**model_keys(name))
    start = reference(0, **model_keys(name))[1]
    for n, (outcome, one) in enumerate(zip(outcomes, expected, strict=True)):
        assert not outcome.skipped
        relative = NORM_LATER if n else NORM
        assert outcome.grad_norm == pytest.approx(one.grad_norm, rel=relative)
        assert outcome.grad_norms == pytest.approx(one.grad_norms, rel=relative)
        assert outcome.grad_norm > KEYS.clip_grad
    assert parameters.keys() == expected_parameters.keys()
    for key, value in expected_parameters.items():
        moved = (value - start[key]).norm()
        error = (parameters[key] - value).norm()
        assert error <= 1e-3 * moved + 1e-6 * value.norm(), f"{key}: off by {error:.2e} after a way of {moved:.2e}"


def counted_twice(plan: ExperimentPlan) -> Trained:
    """Breaks the counted-once rule on purpose: every tensor parallel rank counts what all of them hold."""
    where = megatron_optimizer.tensor_parallel
    with mock.patch.object(where, "param_is_not_tensor_parallel_duplicate", return_value=True):
        return trained(plan, 1)


def shared_counted_twice(plan: ExperimentPlan) -> Trained:
    """Breaks it otherwise: the last stage counts its copy of the embedding."""
    with mock.patch.object(megatron_optimizer, "param_is_not_shared", return_value=True):
        return trained(plan, 1)


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (counted_twice, "vit_dp4-llm_tp2dp2"),
        (counted_twice, "vit_tp2dp2-llm_dp4"),
        (shared_counted_twice, "vit_dp4-llm_tp2pp2"),
    ],
)
def test_a_parameter_counted_twice_is_noticed(broken: Callable[..., Trained], name: str) -> None:
    """Negative control of the norm."""
    outcomes, _ = run_ranks(4, broken, plan_of(name))[0]
    assert outcomes[0].grad_norm != pytest.approx(reference()[0][0].grad_norm, rel=NORM)


def with_a_bad_gradient(plan: ExperimentPlan, module: str, rank: int, value: float) -> tuple[list[StepOutcome], bool]:
    """Step 0; step 1 with one value of one module on one rank replaced; step 1 again. And whether weights stayed."""
    state = build_state(plan)
    finalize = step_module.finalize_gradients

    def finalize_badly(state: TrainState) -> None:
        finalize(state)
        if dist.get_rank() == rank:
            bucket = state.wrapped[module].buffers[0].buckets[0]
            group = state.wrapped[module].buffers[0].data_parallel_group
            bucket.grad_data.chunk(group.size())[group.rank()][0] = value

    try:
        outcomes = [one_step(state, 0)]
        before = [p.detach().clone() for raw in state.raw.values() for p in raw.parameters()]
        with mock.patch.object(step_module, "finalize_gradients", finalize_badly):
            outcomes.append(one_step(state, 1))
        after = [p for raw in state.raw.values() for p in raw.parameters()]
        unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return [*outcomes, one_step(state, 1)], unchanged
    finally:
        state.topology.destroy()


@pytest.mark.parametrize(
    ("module", "rank", "value"), [(VISION, 3, float("nan")), (LANGUAGE, 1, float("inf")), (VISION, 0, float("-inf"))]
)
def test_a_bad_gradient_skips_the_step_everywhere(module: str, rank: int, value: float) -> None:
    """And leaves nothing behind: the next step is what it would have been."""
    ranks = run_ranks(4, with_a_bad_gradient, plan_of("vit_dp4-llm_tp2dp2"), module, rank, value)
    expected, _ = reference()
    for outcomes, unchanged in ranks:
        assert [outcome.skipped for outcome in outcomes] == [False, True, False]
        assert unchanged
        assert outcomes[2].grad_norm == pytest.approx(expected[1].grad_norm, rel=NORM_LATER)


@pytest.mark.parametrize("frozen", ["encoder", "merger", "language"])
def test_frozen_parts_stay_to_the_bit(frozen: str) -> None:
    """And the others train, with weight decay, over pipeline stages and with microbatches of text alone."""
    outcomes, parameters = run_ranks(4, trained, plan_of("vit_dp4-llm_tp2pp2", **FROZEN[frozen]))[0]
    assert not any(outcome.skipped for outcome in outcomes)
    for key, start in reference(0)[1].items():
        part = "merger" if ".merger." in key else "vision" if key.startswith("model.visual") else "language"
        stays = FROZEN[frozen].get(f"freeze_{part}", False)
        assert torch.equal(parameters[key], start) == stays, key


def test_learning_rate_factors() -> None:
    """Without weight decay Adam's first step moves each parameter by its learning rate at most, and nearly that."""
    factors = {"vision_lr_mult": 0.5, "merger_lr_mult": 2.0}
    keys = OptimizerConfig(lr=1e-3, lr_decay_style="constant", weight_decay=0.0, adam_eps=1e-12, **factors)
    _, parameters = run_ranks(4, trained, plan_of("vit_tp2dp2-llm_tp2dp2", keys), 1)[0]
    for key, start in reference(0)[1].items():
        part = "merger" if ".merger." in key else "vision" if key.startswith("model.visual") else "language"
        factor = factors.get(f"{part}_lr_mult", 1.0)
        assert (parameters[key] - start).abs().max() == pytest.approx(1e-3 * factor, rel=1e-2), key


def decays(no_weight_decay: list[str] | None) -> set[str]:
    """Names of the parameters that weight decay pulled towards zero in one step."""
    ways = []
    for decay in (0.0, 0.5):
        more = {} if no_weight_decay is None else {"no_weight_decay": no_weight_decay}
        keys = OptimizerConfig(lr=1e-2, lr_decay_style="constant", weight_decay=decay, **more)
        ways.append(run_ranks(4, trained, plan_of("vit_dp4-llm_tp2pp2", keys), 1)[0][1])
    pulled = set()
    for key, start in reference(0)[1].items():
        way = ways[1][key] - ways[0][key]
        if torch.allclose(way, -1e-2 * 0.5 * start, atol=1e-6) and start.any():
            pulled.add(key)
        else:
            assert torch.allclose(way, torch.zeros_like(way), atol=1e-7), key
    return pulled


def test_weight_decay_is_for_matrices_and_can_be_set_by_name() -> None:
    start = reference(0)[1]
    matrices = {key for key, value in start.items() if value.ndim > 1}
    assert decays(None) == matrices
    embeddings = {"model.visual.pos_embed.weight", "model.language_model.embed_tokens.weight"}
    assert decays(["*.bias", "*norm*", "*.A_log", "*.dt_bias", "*embed.weight", "*embed_tokens*"]) == (
        matrices - embeddings
    )


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("decoder.*", r"no_weight_decay = 'decoder\.\*': matches no parameter; names are such as "),
        ("*.q_proj.weight", r"no_weight_decay = .*q_proj\.weight.*is trained as one parameter with .*k_proj\.weight"),
    ],
)
def test_a_name_that_cannot_be_honoured_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        raise UserError(run_ranks(1, refusal, single(OptimizerConfig(no_weight_decay=[pattern])))[0])


def refusal(plan: ExperimentPlan) -> str:
    """The message with which building ends. Runs on a rank of the pool."""
    try:
        build_state(plan)
    except UserError as error:
        return str(error)
    raise AssertionError("nothing was refused")
