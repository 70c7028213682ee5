"""Unified against colocated: the same losses, whatever vit_batch_factor."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from flagscale.config.schema import OptimizerConfig
from flagscale.plan.plan import ExperimentPlan
from flagscale.train.step import TrainStep
from tests.dist.harness import Samples, build_state, loss_weights, macro_batches, make_plan
from tests.dist.pool import run_ranks

ITERATIONS = 12
MEAN, MAXIMUM = 5e-4, 5e-3  # relative differences that training in fp32 may show
GROWTH = 1e-6  # rounding, which may be larger for one factor than for another
SAMPLES = Samples(seed=11)
COMMON = {
    "tensor_model_parallel_size": 2, "micro_batch_size": 1, "global_batch_size": 8, "train_iters": ITERATIONS,
    "optimizer": OptimizerConfig(lr=3e-3, clip_grad=0.5, lr_warmup_iters=3),
}  # fmt: skip
# ViT DP2 and LLM TP2, where a macro batch of factor 8 is a whole step; test_gradients.py and test_optimizer.py compare
# the other layouts, over three steps.
WORLD = 2


def losses(plan: ExperimentPlan) -> list[tuple[float, float]]:
    """(lm, mtp) of each iteration. Runs on a rank of the pool."""
    state = build_state(plan)
    try:
        step, found = TrainStep(state), []
        for n in range(plan.config.model.train_iters):
            batch = n % 2  # few enough samples to be learnt by heart
            weights = loss_weights(plan, SAMPLES, batch)
            report = step.run(macro_batches(plan, SAMPLES, dist.get_rank(), batch), weights)
            lm, mtp = report.loss_sums.tolist()
            found.append((lm * weights.lm, mtp * weights.mtp))
        return found
    finally:
        state.topology.destroy()


def test_losses_do_not_depend_on_the_factor() -> None:
    """Mean and maximum relative difference to unified, for factors 2, 4 and 8; it does not grow with the factor."""
    unified: dict[str, Any] = {"use_mimo": False}
    reference = run_ranks(WORLD, losses, make_plan(WORLD, **COMMON, **unified), timeout=180)[0]
    assert reference[-1][0] < 0.9 * reference[1][0], "nothing was learnt, so nothing is compared"
    means: list[list[float]] = []
    for factor in (2, 4, 8):
        plan = make_plan(WORLD, **COMMON, vision_micro_batch_size=factor // 2)
        assert (plan.layout, plan.batch.vit_batch_factor) == ("colocated", factor)
        found = run_ranks(WORLD, losses, plan, timeout=180)[0]
        mean = [0.0, 0.0]
        for which in (0, 1):
            pairs = zip(reference, found, strict=True)
            differences = [abs(one[which] - other[which]) / one[which] for one, other in pairs]
            mean[which] = sum(differences) / len(differences)
            assert mean[which] <= MEAN, f"factor {factor}: {differences}"
            assert max(differences) <= MAXIMUM, f"factor {factor}: {differences}"
        means.append(mean)
    for of_loss in zip(*means, strict=True):
        assert of_loss[-1] <= 3 * of_loss[0] + GROWTH, f"it grows with the factor: {of_loss}"
