"""Random layouts, batches and samples: no step hangs, and all agree with the single process.

Cases come in groups that share a built model (layout, frozen parts, heads, experts), because building costs more than a
case. Each case draws its batch (microbatches, factor, short last macro batch, balance, recomputation, packing), its
samples, and the order in which it trains, validates and steps. `-m long` runs a thousand cases, the rest of the suite
forty of other seeds. The single process computes padded rows whatever the case packs.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flagscale.config.schema import OptimizerConfig
from flagscale.plan.plan import ExperimentPlan
from flagscale.train.build import TrainState
from flagscale.train.evaluate import evaluate
from flagscale.train.step import TrainStep
from tests.dist.harness import HeldOut, Samples, accumulated, build_state, loss_weights, macro_batches, make_plan
from tests.dist.pool import LIMIT, Pool, RankTimeout, shared_pool
from tests.dist.test_expert_gradients import MOE
from tests.dist.test_gradients import FROZEN, compare
from tests.dist.test_packing import MODES, with_data

CI_SEEDS = (0, 7, 9, 11, 16, 19, 26, 36)  # worlds of 4 and 6: groups of all kinds of layouts and frozen parts
LAYERS = {1: 2, 2: 2, 3: 3, 4: 4}  # by pipeline stages
IMAGES = [(0, 1, 2, 3), (0,), (1,), (0, 0, 0, 3), (2, 3)]
ORDERS = [("gradients",), ("step",), ("evaluate", "gradients"), ("step", "evaluate", "step"), ("gradients", "evaluate")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """What a built model is made from; `model` are keys that the single process shares."""

    world: int
    layout: dict[str, Any]
    model: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One draw: keys of the batch and of `data`, samples, actions; `filled` samples of a validation batch, the other
    slots empty."""

    batch: dict[str, Any]
    data: dict[str, Any]
    samples: Samples
    actions: tuple[str, ...]
    filled: int


def draw_group(draw: random.Random) -> Group:
    """A layout that fits its world, frozen parts, kinds of output layer, and experts or none."""
    world = draw.choices([2, 4, 6, 8], [3, 5, 1, 1])[0]
    while True:
        tp, pp, vision_tp = draw.choice([1, 2, 4]), draw.choice([1, 1, 2, 3, 4]), draw.choice([1, 1, 2, 4])
        if world % (tp * pp) == 0 and world % vision_tp == 0:
            break
    layout: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "sequence_parallel": draw.random() < 0.5,
        "use_mimo": draw.random() < 0.9,
        "vision_tensor_model_parallel_size": vision_tp,
    }
    model = {
        "num_layers": LAYERS[pp],
        "full_attention_interval": 2,
        "vision_num_layers": 1,
        "mtp_num_layers": draw.choice([0, 1, 1]),
        "untie_embeddings_and_output_weights": draw.random() < 0.3,
        # Steps take part in the cases but leave the weights, so that every case starts from the same ones.
        "optimizer": OptimizerConfig(lr=0.0, weight_decay=0.0),
        **draw.choice([{}, {}, *FROZEN.values()]),
    }
    if draw.random() < 0.25:
        # Megatron-Core folds the balancing loss's weight into the built model, so a group has one for all its batches.
        model |= MOE | {"num_layers": LAYERS[pp]}
        layout["sequence_parallel"] |= tp > 1
        layout["expert_model_parallel_size"] = draw.choice([n for n in (1, 2, 4) if world // pp % n == 0])
    return Group(world=world, layout=layout, model=model)


def draw_case(draw: random.Random, group: Group) -> Case:
    """Up to 6 microbatches and 16 samples, a factor up to 6, samples without, with one or with several images.

    Half the cases pack their rows; with experts none does, because the balancing loss is one of rows.
    """
    language_dp = group.world // group.layout["tensor_model_parallel_size"]
    language_dp //= group.layout["pipeline_model_parallel_size"]
    micro_batch_size = draw.choice([1, 1, 2])
    microbatches = draw.randint(1, min(6, 16 // (micro_batch_size * language_dp)))
    batch: dict[str, Any] = {"micro_batch_size": micro_batch_size}
    batch["global_batch_size"] = micro_batch_size * language_dp * microbatches
    batch["vision_balance"] = draw.choice(["none", "replica", "node", "world"])
    batch["vision_recompute"] = draw.random() < 0.3
    if group.layout["use_mimo"]:
        vision_dp = group.world // group.layout["vision_tensor_model_parallel_size"]
        samples_of_microbatch = language_dp * micro_batch_size
        smallest = vision_dp // math.gcd(vision_dp, samples_of_microbatch)  # factor that vision_dp can share out
        factor = smallest * draw.randint(1, max(1, 6 // smallest))
        batch["vision_micro_batch_size"] = factor * samples_of_microbatch // vision_dp
    packs = "num_experts" not in group.model and draw.random() < 0.5
    return Case(
        batch=batch,
        data=draw.choice(MODES[1:]) if packs else {},
        samples=Samples(seed=draw.randrange(10**6), images=draw.choice(IMAGES)),
        actions=draw.choice(ORDERS),
        filled=draw.randint(1, batch["global_batch_size"]),
    )


_built: dict[str, TrainState] = {}  # of this rank, in a session


def build_once(plan: ExperimentPlan) -> None:
    """Builds the model of the session. Runs on a rank."""
    _built["state"] = build_state(plan)


def destroy() -> None:
    """Ends what `build_once` made. Runs on a rank."""
    _built.pop("state").topology.destroy()


def act(plan: ExperimentPlan, case: Case) -> list[Any]:
    """The results of a case's actions, on rank 0. Runs on a rank."""
    state = dataclasses.replace(_built["state"], plan=plan)
    step, found = TrainStep(state), []
    for n, action in enumerate(case.actions):
        if action == "gradients":
            found.append(accumulated(state, case.samples, n))
        elif action == "step":
            report = step.run(
                macro_batches(plan, case.samples, dist.get_rank(), n), loss_weights(plan, case.samples, n)
            )
            found.append((report.outcome.grad_norms, report.loss_sums.tolist()))
        else:
            result = evaluate(state, step, HeldOut(plan, case.samples, case.filled), 1)
            assert len(result.predictions) == case.filled
            found.append(result)
    return found if dist.get_rank() == 0 else []


def moved_by_rounding(plan: ExperimentPlan, case: Case, n: int) -> dict[str, float]:
    """How far rounding moves each gradient of the single process, by name: the largest of three draws in which every
    weight is off by 3e-7 of itself, which is what the rows of an encoder at two tensor parallel sizes differ by."""
    state = dataclasses.replace(_built["state"], plan=plan)
    weights = [parameter for module in state.raw.values() for parameter in module.parameters()]
    kept = [weight.detach().clone() for weight in weights]
    plain, largest = accumulated(state, case.samples, n), {}
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight, value in zip(weights, kept, strict=True):
                weight.copy_(value * (1 + 3e-7 * torch.randn(value.shape, generator=generator)))
        for name, gradient in accumulated(state, case.samples, n).items():
            largest[name] = max(largest.get(name, 0.0), (gradient - plain[name]).norm().item())
    with torch.no_grad():
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)
    return largest


def same_gradients(found: Any, expected: Any, label: str, moved: Callable[[], dict[str, float]]) -> None:
    """Gradients within the bound of `compare`. Among a thousand draws some lie where a gradient turns sharply: there,
    and only there, within three times what rounding of the weights does in one process, and never over 1e-3."""
    try:
        compare(found, expected, label)
    except AssertionError:
        slack = {name: min(3 * error, 1e-3 * expected[name].norm().item()) for name, error in moved().items()}
        compare(found, expected, label, slack)


def same(found: Any, expected: Any, label: str) -> None:
    """Results of a step or a validation within rounding."""
    if isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6), label
    else:
        assert [p.sample for p in found.predictions] == [p.sample for p in expected.predictions], label
        assert [p.expected for p in found.predictions] == [p.expected for p in expected.predictions], label
        losses = (expected.lm_loss, expected.mtp_loss)
        assert (found.lm_loss, found.mtp_loss) == pytest.approx(losses, rel=1e-5), label


def single_process(group: Group, size: int) -> ExperimentPlan:
    """The plan of one process that computes global batches of this size."""
    micro = max(n for n in (1, 2, 3, 4) if size % n == 0)
    return make_plan(1, **group.model, global_batch_size=size, micro_batch_size=micro, vision_micro_batch_size=micro)


def run_group(reference: Pool, seed: int, cases: int, timeout: float = LIMIT) -> None:
    """Draws a group and its cases, and runs all of them."""
    draw = random.Random(seed)
    group = draw_group(draw)
    drawn = [draw_case(draw, group) for _ in range(cases)]
    with shared_pool().session(group.world) as many, reference.session(1) as one:
        plans = [
            with_data(make_plan(group.world, **group.layout, **group.model, **case.batch), **case.data)
            for case in drawn
        ]
        many(build_once, plans[0])
        one(build_once, single_process(group, plans[0].batch.global_batch_size))
        for number, (plan, case) in enumerate(zip(plans, drawn, strict=True)):
            label = f"seed {seed}, case {number}: {group}, {case}"
            try:
                found = many(act, plan, case, timeout=timeout)[0]
            except AssertionError as error:
                raise AssertionError(f"{label}\n{error}") from error
            alone = single_process(group, case.batch["global_batch_size"])
            for n, (result, expected) in enumerate(zip(found, one(act, alone, case)[0], strict=True)):
                if isinstance(expected, dict):
                    moved = partial(one, moved_by_rounding, alone, case, n)
                    same_gradients(result, expected, label, lambda moved=moved: moved()[0])
                else:
                    same(result, expected, label)
        many(destroy)
        one(destroy)


@pytest.fixture(scope="module")
def reference() -> Iterator[Pool]:
    """The single process, which answers while the ranks of a session wait."""
    pool = Pool()
    yield pool
    pool.end()


@pytest.mark.parametrize("seed", CI_SEEDS)
def test_random_cases(reference: Pool, seed: int) -> None:
    run_group(reference, seed, cases=5)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_random_cases(reference: Pool, block: int) -> None:
    for seed in range(1000 + 10 * block, 1010 + 10 * block):
        run_group(reference, seed, cases=10)


def stay_away(plan: ExperimentPlan, case: Case) -> None:
    """Breaks the step on purpose: rank 0 does not take part."""
    state = dataclasses.replace(_built["state"], plan=plan)
    batches = macro_batches(plan, case.samples, dist.get_rank())
    if dist.get_rank():
        TrainStep(state).accumulate(batches, loss_weights(plan, case.samples))


def test_a_hang_is_noticed() -> None:
    """Negative control: the time limit ends a case that waits for a rank for ever."""
    plan = make_plan(2, global_batch_size=4, vision_micro_batch_size=1)
    case = Case(batch={}, data={}, samples=Samples(seed=1), actions=(), filled=1)
    pool = Pool()  # its ranks end here
    with pool.session(2) as run:
        run(build_once, plan)
        with pytest.raises(RankTimeout, match=r"did not finish within 4\.0 s"):
            run(stay_away, plan, case, timeout=4.0)
