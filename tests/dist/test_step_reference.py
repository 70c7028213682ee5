"""A colocated training step against transformers: gradients of the loss over the global batch, by plain autograd.

transformers' model has nothing of Megatron-Core, of a schedule, an exchange or a layout: one process, one sample after
the other, one backward. Its MTP layer is written down in `tests/models/tiny.py`.
"""

from __future__ import annotations

import pytest
import torch

from flagscale.models.qwen35.weights import gather_canonical
from flagscale.plan.layout import LANGUAGE
from flagscale.plan.plan import ExperimentPlan
from flagscale.train.language import LossWeights
from tests.dist.harness import (
    Samples,
    accumulated,
    build_state,
    gradients_of_steps,
    loss_weights,
    make_plan,
    text_batch,
)
from tests.dist.pool import run_ranks
from tests.dist.test_gradients import MIXED, compare
from tests.models.tiny import Batch, Reference

BATCH = {"global_batch_size": 8, "micro_batch_size": 2}


def initial_weights(plan: ExperimentPlan) -> dict[str, torch.Tensor]:
    """The weights a single process starts from, by Hugging Face name."""
    state = build_state(plan)
    try:
        model = plan.config.model
        return {k: v for module in state.raw.values() for k, v in gather_canonical(module, model).items()}
    finally:
        state.topology.destroy()


def reference_batch(samples: Samples, i: int, plan: ExperimentPlan) -> Batch:
    """Sample i alone, as the reference model takes it."""
    text, sample, model = text_batch(samples, [i]), samples.sample(i), plan.config.model
    grids = [(p.grid_h, p.grid_w) for p in sample.placements]
    values = 3 * model.vision_temporal_patch_size * model.vision_patch_size**2
    pixels = [samples.pixels(i, p.media, p.grid_h * p.grid_w, values) for p in sample.placements]
    return Batch(
        input_ids_BS=text.input_ids_BS,
        labels_BS=text.labels_BS,
        kind_BS=(text.input_ids_BS == model.image_token_id).int(),
        position_ids_3BS=text.position_ids_3BS,
        attention_mask_BS=text.input_ids_BS != 0,
        loss_mask_BS=text.loss_mask_BS,
        mtp_mask_BS=text.mtp_mask_BS,
        pixels_PC=torch.cat(pixels) if pixels else torch.empty(0, values),
        grid_hw=grids,
        row_of_V=torch.empty(0, dtype=torch.long),
    )


def autograd_gradients(plan: ExperimentPlan, samples: Samples) -> dict[str, torch.Tensor]:
    """d/d(parameter) of: LM loss summed over the global batch / its targets + factor x the same for MTP."""
    weights = loss_weights(plan, samples)
    tensors = run_ranks(1, initial_weights, plan)[0]
    model = Reference(plan.config.model, tensors)
    for i in range(plan.batch.global_batch_size):
        batch = reference_batch(samples, i, plan)
        out = model(batch)
        loss = weights.lm * (out["lm"] * batch.loss_mask_BS).sum()
        if out["mtp"] is not None:
            loss = loss + weights.mtp * (out["mtp"] * batch.mtp_mask_BS).sum()
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if name in tensors}


@pytest.mark.parametrize("mtp", [0, 1], ids=["lm", "lm-and-mtp"])
def test_gradients_equal_transformers(mtp: int) -> None:
    one = make_plan(1, **BATCH, vision_micro_batch_size=2, mtp_num_layers=mtp)
    expected = autograd_gradients(one, MIXED)
    colocated = {"tensor_model_parallel_size": 2, "vision_micro_batch_size": 2, "mtp_num_layers": mtp}
    four = make_plan(4, **BATCH, **colocated)
    assert four.batch.vit_batch_factor == 2
    found = run_ranks(4, gradients_of_steps, [four], MIXED)[0][0]
    compare(found, expected, "colocated against transformers")


def mean_of_replicas(plan: ExperimentPlan, samples: Samples) -> dict[str, torch.Tensor]:
    """Breaks the gradient scale on purpose: each replica's loss is divided by its own targets, then averaged.

    It is what data parallel averaging of a mean loss does, and right only where all replicas have the same targets.
    """
    state = build_state(plan)
    try:
        replica = state.topology.coordinate(LANGUAGE)["dp"]
        size = plan.batch.micro_batch_size
        ids = [i for i in range(plan.batch.global_batch_size) if i // size % plan.language.dp == replica]
        own = sum(sum(samples.sample(i).targets[1:]) for i in ids)
        return accumulated(state, samples, weights=LossWeights(lm=1.0 / own / plan.language.dp, mtp=0.0))
    finally:
        state.topology.destroy()


def test_a_mean_over_replicas_is_noticed() -> None:
    """Negative control of the gradient scale."""
    plan = make_plan(4, **BATCH, tensor_model_parallel_size=2, vision_micro_batch_size=2, mtp_num_layers=0)
    right = run_ranks(4, gradients_of_steps, [plan], MIXED)[0][0]
    broken = run_ranks(4, mean_of_replicas, plan, MIXED)[0]
    with pytest.raises(AssertionError, match="g_ref"):
        compare(broken, right, "mean over replicas")
