"""Equality with transformers: losses and gradients of the same weights, at every layout."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flagscale.config.schema import ModelConfig
from tests.dist.pool import run_ranks
from tests.models.ranks import full_step
from tests.models.tiny import Batch, hf_model, make_batch, random_weights, tiny_model

BATCHES: dict[str, dict[str, Any]] = {
    "text": {"samples": [[11], [7]]},
    "one image": {"samples": [[5, (4, 6), 3]]},
    "unequal images": {"samples": [[5, (4, 6), 7], [3, (2, 2), 2, (6, 4), 4], [9]]},
    "left padding": {"samples": [[5, (4, 6), 7], [3, (2, 2), 2], [9]], "left": True},
}
LAYOUTS = [
    {"tp": 1, "pp": 1, "vtp": 1, "sp": False},
    {"tp": 2, "pp": 1, "vtp": 1, "sp": False},
    {"tp": 2, "pp": 1, "vtp": 2, "sp": True},
    {"tp": 4, "pp": 1, "vtp": 2, "sp": False},  # more ranks than KV groups
    {"tp": 4, "pp": 1, "vtp": 4, "sp": True},
    {"tp": 1, "pp": 2, "vtp": 1, "sp": False},
    {"tp": 2, "pp": 2, "vtp": 1, "sp": True},
]


@functools.cache
def reference(kind: str, tied: bool) -> tuple[ModelConfig, dict[str, Tensor], Batch, dict[str, Any]]:
    """The model, its weights, a batch, and what transformers makes of them."""
    model = tiny_model(mtp_num_layers=0, untie_embeddings_and_output_weights=not tied)
    weights = random_weights(model)
    batch = make_batch(model, multiple=4, **BATCHES[kind])
    hf = hf_model(model, weights)
    inputs: dict[str, Any] = {}
    rows = None
    if batch.grid_hw:
        grid = torch.tensor([[1, h, w] for h, w in batch.grid_hw])
        rows = hf.model.visual(batch.pixels_PC, grid).pooler_output.detach()
        inputs = {"pixel_values": batch.pixels_PC, "image_grid_thw": grid}
    logits = hf(
        input_ids=batch.input_ids_BS,
        position_ids=batch.position_ids_3BS,
        attention_mask=batch.attention_mask_BS.long(),
        mm_token_type_ids=(batch.input_ids_BS == model.image_token_id).int(),
        **inputs,
    ).logits
    lm_BS = functional.cross_entropy(logits.transpose(1, 2), batch.labels_BS, reduction="none")
    (lm_BS * batch.loss_mask_BS).sum().backward()
    gradients = {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}
    return model, weights, batch, {"rows": rows, "lm": lm_BS.detach(), "gradients": gradients}


def changed(model: ModelConfig, **changes: Any) -> ModelConfig:
    """A copy of a configuration."""
    import dataclasses

    return dataclasses.replace(model, **changes)


def relative(mine: Tensor, other: Tensor) -> float:
    """Distance of two tensors over the length of the second."""
    return float((mine - other).norm() / other.norm().clamp(min=1e-12))


def check_gradients(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """1e-4 relative for each parameter; A_log and dt_bias 1e-3: their gradients are small sums of large terms."""
    for name, gradient in expected.items():
        limit = 1e-3 if name.endswith(("A_log", "dt_bias")) else 1e-4
        assert relative(mine[name], gradient) <= limit, (name, relative(mine[name], gradient))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "-".join(f"{key}{int(x[key])}" for key in x))
@pytest.mark.parametrize(("kind", "tied"), [("unequal images", True)])
def test_every_layout_equals_transformers(layout: dict[str, Any], kind: str, tied: bool) -> None:
    model, weights, batch, expected = reference(kind, tied)
    model = changed(model, sequence_parallel=layout["sp"])
    results = run_ranks(layout["tp"] * layout["pp"], full_step, model, weights, batch, layout, None, timeout=120.0)
    compare(results, batch, expected, layout)


@pytest.mark.parametrize("kind", [kind for kind in BATCHES if kind != "unequal images"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_kind_of_batch_equals_transformers(kind: str, tied: bool) -> None:
    model, weights, batch, expected = reference(kind, tied)
    results = run_ranks(1, full_step, model, weights, batch, LAYOUTS[0], None, timeout=120.0)
    compare(results, batch, expected, LAYOUTS[0])


def compare(results: list[dict[str, Any]], batch: Batch, expected: dict[str, Any], layout: dict[str, Any]) -> None:
    """Rows, losses and gradients of all ranks."""
    gradients: dict[str, Tensor] = {}
    for rank, result in enumerate(results):
        if expected["rows"] is not None:
            assert (result["rows"] - expected["rows"]).abs().max() <= 1e-5
        if result["losses"] is not None:
            difference = (result["losses"][0] - expected["lm"]) * batch.loss_mask_BS
            assert difference.abs().max() <= 1e-4
        if rank % layout["tp"]:
            continue
        for name, gradient in result["gradients"].items():
            first = name not in gradients or name.startswith("model.visual.")
            gradients[name] = gradient if first else gradients[name] + gradient  # both copies of a tied embedding
    if expected["rows"] is not None:
        check_gradients(gradients, expected["gradients"])
    else:
        check_gradients(gradients, {k: v for k, v in expected["gradients"].items() if "visual" not in k})
