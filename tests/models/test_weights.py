"""Weights go in and out by their Hugging Face names without losing a bit, at every layout."""

from __future__ import annotations

import pytest
import torch

from flagscale.models.qwen35.canonical import canonical_shapes
from tests.dist.pool import run_ranks
from tests.models.ranks import held_weights, vision_alone
from tests.models.tiny import Reference, make_batch, random_weights, tiny_model

LAYOUTS = [{"tp": 1, "pp": 1, "vtp": 1}, {"tp": 4, "pp": 1, "vtp": 2}, {"tp": 2, "pp": 2, "vtp": 4}]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_names_and_shapes_are_transformers_own(tied: bool) -> None:
    model = tiny_model(untie_embeddings_and_output_weights=not tied)
    reference = Reference(model, random_weights(model))
    theirs = {name: tuple(value.shape) for name, value in reference.named_parameters()}
    assert canonical_shapes(model) == theirs


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "-".join(f"{key}{x[key]}" for key in x))
def test_loaded_weights_come_back_to_the_bit(layout: dict[str, int]) -> None:
    model = tiny_model(untie_embeddings_and_output_weights=layout["pp"] == 1)
    weights = random_weights(model)
    back = {}
    for held in run_ranks(layout["tp"] * layout["pp"], held_weights, model, weights, layout):
        for name, value in held.items():  # every rank, so that a wrong copy on any of them shows
            assert torch.equal(value, weights[name]), name
        back.update(held)
    assert back.keys() == weights.keys()


def test_initial_weights_do_not_depend_on_the_layout() -> None:
    model = tiny_model()
    single = run_ranks(1, held_weights, model, None, LAYOUTS[0])[0]
    for layout in LAYOUTS[1:]:
        for held in run_ranks(4, held_weights, model, None, layout):
            assert all(torch.equal(value, single[name]) for name, value in held.items())


def test_initial_weights_are_those_that_transformers_would_take() -> None:
    """Constants equal, random ones of the configured spread, but for the time steps; the seed matters."""
    from transformers import Qwen3_5ForConditionalGeneration

    from tests.models.tiny import hf_config

    model = tiny_model()
    held = run_ranks(1, held_weights, model, None, LAYOUTS[0])[0]
    other = run_ranks(1, held_weights, tiny_model(seed=model.seed + 1), None, LAYOUTS[0])[0]
    for name, theirs in Qwen3_5ForConditionalGeneration(hf_config(model)).named_parameters():
        if name.endswith("dt_bias"):
            # theirs is 1, a placeholder for loaded weights; ours is the inverse softplus of steps from 0.001 to 0.1
            steps = torch.nn.functional.softplus(held[name])
            assert ((steps >= 0.999e-3) & (steps <= 1.001e-1)).all(), name
            assert not torch.equal(held[name], other[name])
        elif theirs.std() == 0:
            assert torch.equal(held[name], theirs.float()), name
        elif name.endswith("A_log"):
            assert held[name].max() <= torch.tensor(16.0).log()
        else:
            assert held[name].std() == pytest.approx(model.init_method_std, rel=0.25), name
            assert not torch.equal(held[name], other[name])


def test_weights_of_another_model_are_refused_by_name() -> None:
    model = tiny_model()
    weights = random_weights(tiny_model(ffn_hidden_size=80))
    message = run_ranks(1, held_weights, model, weights, LAYOUTS[0])[0]
    assert isinstance(message, str)
    assert "mlp.gate_proj.weight" in message
    assert "(80, 64)" in message
    assert "(96, 64)" in message


def test_frozen_parts_get_no_gradients_and_keep_no_activations() -> None:
    everything = tiny_model()
    batch = make_batch(everything, [[1, (4, 4), 2]])
    free = run_ranks(1, vision_alone, everything, batch)[0]
    trunk = run_ranks(1, vision_alone, tiny_model(freeze_vision=True, freeze_language=True), batch)[0]
    assert trunk["gradients"].keys() == {name for name in free["gradients"] if ".merger." in name}
    assert trunk["language"] == 0
    assert free["language"] > 0
    assert trunk["kept"] < free["kept"] / 4
    merger = run_ranks(1, vision_alone, tiny_model(freeze_merger=True), batch)[0]
    assert merger["gradients"].keys() == {name for name in free["gradients"] if ".merger." not in name}
    assert "model.visual.pos_embed.weight" in merger["gradients"]
