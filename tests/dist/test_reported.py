"""What a run reports is what its ranks did: the encoder's load, and the steps that were skipped."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flagscale.plan.layout import LANGUAGE, VISION
from flagscale.plan.plan import ExperimentPlan
from flagscale.platforms import get_platform
from flagscale.train import step as step_module
from flagscale.train.build import TrainState, build
from flagscale.train.loop import Training
from flagscale.train.metrics import read_metrics
from tests.dist.pool import run_ranks
from tests.dist.test_training import plan_of, train, validated

BAD = 2  # the iteration, from 0, whose gradient is spoiled


def encoded_patches(plan: ExperimentPlan) -> list[list[int]]:
    """Patches of every item that went into this rank's encoder, a list an iteration. Runs on a rank of the pool."""
    state = build(plan, get_platform("cpu"))
    found: list[list[int]] = []

    def note(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        pixels_PC, grids = arguments
        found[-1] += [height * width for height, width in grids]
        assert len(pixels_PC) == sum(height * width for height, width in grids)

    try:
        if state.topology.has(VISION):
            state.raw[VISION].register_forward_pre_hook(note)
        with Training(state, plan.exp_dir) as training:
            for step in range(plan.config.model.train_iters):
                found.append([])
                training._iterate(step)
        return found
    finally:
        state.topology.destroy()


def forward_flops(plan: ExperimentPlan, patches: int) -> int:
    """Products of an encoder forward over one item, written down by hand: 2 * m * k * n each."""
    model = plan.config.model
    width, inner = model.vision_hidden_size, model.vision_ffn_hidden_size
    values = 3 * model.vision_temporal_patch_size * model.vision_patch_size**2
    embed = 2 * patches * values * width
    projections = 2 * patches * width * (3 * width + width)  # query, key, value; output
    scores = 2 * (2 * patches * patches * width)  # query by key, weights by value, over all heads
    mlp = 2 * (2 * patches * width * inner)
    merged = width * model.vision_spatial_merge_size**2
    tokens = patches // model.vision_spatial_merge_size**2
    merger = 2 * tokens * merged * merged + 2 * tokens * merged * model.hidden_size
    return embed + model.vision_num_layers * (projections + scores + mlp) + merger


def max_over_mean(loads: list[int]) -> float:
    return max(loads) / (sum(loads) / len(loads))


@pytest.mark.parametrize(
    "keys",
    [
        ("model.vision_balance=world", "model.vision_micro_batch_size=2"),
        ("model.vision_balance=none",),
        ("model.vision_balance=none", "model.vision_tensor_model_parallel_size=2", "model.vision_micro_batch_size=8"),
        ("model.use_mimo=false",),
    ],
    ids=["even", "uneven", "uneven-tp2", "unified"],
)
def test_reported_load_is_what_the_encoders_were_given(mixture: Path, tmp_path: Path, keys: tuple[str, ...]) -> None:
    """The cost by hand of what each rank's encoder received, summed over an iteration, against the metric."""
    plan = plan_of(mixture, tmp_path / "run", "model.train_iters=3", *keys)
    ranks = run_ranks(4, encoded_patches, plan)
    lines = read_metrics(tmp_path / "run")
    assert len(lines) == 3
    for iteration, line in enumerate(lines):
        received = [ranks[plan.vision.rank(dp=d)][iteration] for d in range(plan.vision.dp)]
        for d, own in enumerate(received):  # the ranks of a replica share every item
            assert all(ranks[plan.vision.rank(tp=tp, dp=d)][iteration] == own for tp in range(plan.vision.tp))
        assert line["num_images"] == sum(map(len, received)) > 0
        costs = [sum(forward_flops(plan, patches) for patches in own) for own in received]
        assert line["vision_load_max_over_mean"] == pytest.approx(max_over_mean(costs), rel=1e-9)
        if "model.vision_balance=none" in keys:  # negative control: other counts give other values
            assert max_over_mean(costs) > 1.02
            for wrong in ([len(own) for own in received], [sum(own) for own in received]):
                assert line["vision_load_max_over_mean"] != pytest.approx(max_over_mean(wrong), rel=1e-6)


def everything(state: TrainState) -> list[torch.Tensor]:
    """Copies of all that an optimizer step changes on this rank: weights, optimizer state, schedule."""
    found = [p.detach().clone() for raw in state.raw.values() for p in raw.parameters()]
    for optimizer in state.optimizer.optimizers.values():
        for part in optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                found += [torch.tensor([group.get("step", 0), group["lr"]], dtype=torch.float64)]
                for p in group["params"]:
                    found += [p.detach().clone(), *(v.clone() for _, v in sorted(part.optimizer.state[p].items()))]
    return [*found, torch.tensor(state.scheduler.num_steps)]


def train_with_a_bad_gradient(plan: ExperimentPlan, module: str, rank: int, value: float) -> tuple[bool, bool, bool]:
    """The whole loop, with one value in one module's gradient on one rank replaced before it is reduced, once.

    Returns:
        Whether all that a step changes stayed to the bit over the bad iteration, changed in the one before, and changed
        in the one after.
    """
    state = build(plan, get_platform("cpu"))
    finalize, seen = step_module.finalize_gradients, []

    def finalize_badly(state: TrainState) -> None:
        seen.append(everything(state))
        if len(seen) == BAD + 1 and dist.get_rank() == rank:
            state.wrapped[module].buffers[0].grad_data[0] = value
        finalize(state)

    try:
        with mock.patch.object(step_module, "finalize_gradients", finalize_badly), Training(state, plan.exp_dir) as run:
            run.run()
        assert all(p.isfinite().all() for raw in state.raw.values() for p in raw.parameters())
        seen.append(everything(state))
        equal = [
            len(one) == len(other) and all(map(torch.equal, one, other)) for one, other in itertools.pairwise(seen)
        ]
        return equal[BAD], not equal[BAD - 1], not equal[BAD + 1]
    finally:
        state.topology.destroy()


@pytest.mark.parametrize(
    ("module", "rank", "value", "stages"),
    [(VISION, 3, float("nan"), 1), (LANGUAGE, 1, float("inf"), 1), (LANGUAGE, 2, float("nan"), 2)],
    ids=["nan-in-the-encoder", "inf-in-the-language-model", "nan-in-the-second-stage"],
)
def test_a_run_skips_a_bad_iteration_and_goes_on(
    mixture: Path, tmp_path: Path, module: str, rank: int, value: float, stages: int
) -> None:
    """Counted in the metrics and in checkpoints; nothing changes anywhere, the learning rate's schedule included."""
    layout = f"model.pipeline_model_parallel_size={stages}"
    plan = plan_of(mixture, tmp_path / "run", "model.train_iters=4", *validated(mixture, 2), layout)
    ranks = run_ranks(4, train_with_a_bad_gradient, plan, module, rank, value)
    assert ranks == [(True, True, True)] * 4
    iterations = 4
    if module == VISION:
        iterations = 5
        longer = plan_of(mixture, tmp_path / "run", "model.train_iters=5", *validated(mixture, 2), layout)
        run_ranks(4, train, longer)
    lines = [line for line in read_metrics(tmp_path / "run") if "lm_loss" in line]
    assert [line["skipped"] for line in lines] == [0, 0, 1, 1, 1][:iterations]
    # Of the bad iteration too where the value lies in a parameter's copy that the norm does not count.
    assert all(math.isfinite(line["grad_norm"]) for n, line in enumerate(lines) if n != BAD)
    rates = [line["learning_rate"] for line in lines]
    assert rates[BAD + 1] == rates[BAD]
    assert rates[0] < rates[1] < rates[2], "the warm-up goes on by one step an iteration that was taken"
    assert all(rate > rates[BAD + 1] for rate in rates[BAD + 2 :])
