"""Gradients of every parameter of both modules equal those of a single process, at any pair of grids.

The single process runs the same step code at world size 1; that one is held against transformers elsewhere
(`tests/models`, `tests/dist/test_step_reference.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.dist.harness import Samples, make_plan, step_gradients
from tests.dist.pool import run_ranks

GLOBAL_BATCH, MICRO_BATCH = 24, 2
RELATIVE, OF_MODULE = 2e-5, 5e-6  # the second is for parameters whose gradients are near zero (A_log, dt_bias)

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_dp4-llm_tp2dp2": (4, {"tensor_model_parallel_size": 2}),
    "vit_dp4-llm_tp2dp2-sp": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "vit_dp4-llm_tp4": (4, {"tensor_model_parallel_size": 4}),
    "vit_dp4-llm_dp4": (4, {}),
    "vit_dp4-llm_tp2pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "vit_dp4-llm_tp2pp2-sp": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "vit_dp4-llm_pp4": (4, {"pipeline_model_parallel_size": 4}),
    "vit_tp2dp2-llm_dp4": (4, {"vision_tensor_model_parallel_size": 2}),
    "vit_tp2dp2-llm_tp2dp2": (4, {"vision_tensor_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
    "vit_dp6-llm_tp2dp3": (6, {"tensor_model_parallel_size": 2}),
    "unified-tp2dp2": (4, {"use_mimo": False, "tensor_model_parallel_size": 2}),
    "unified-tp2pp2": (4, {"use_mimo": False, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


def batch_keys(world: int, keys: dict[str, Any], factor: int) -> dict[str, Any]:
    """Batch keys that give this vit_batch_factor."""
    if not keys.get("use_mimo", True):
        return {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": MICRO_BATCH}
    language_dp = world // (keys.get("tensor_model_parallel_size", 1) * keys.get("pipeline_model_parallel_size", 1))
    vision_dp = world // keys.get("vision_tensor_model_parallel_size", 1)
    vision_micro, rest = divmod(factor * language_dp * MICRO_BATCH, vision_dp)
    assert not rest and vision_micro, f"factor {factor} is not to be had with {keys}"
    return {
        "global_batch_size": GLOBAL_BATCH, "micro_batch_size": MICRO_BATCH, "vision_micro_batch_size": vision_micro,
    }  # fmt: skip


@cache
def reference(samples: Samples, **keys: Any) -> dict[str, torch.Tensor]:
    """Gradients of the same batch in one process."""
    plan = make_plan(1, global_batch_size=GLOBAL_BATCH, micro_batch_size=3, vision_micro_batch_size=6, **keys)
    return run_ranks(1, step_gradients, plan, samples)[0]


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every parameter within |g - g_ref| <= 2e-5 |g_ref| + 5e-6 |module gradient|."""
    assert found.keys() == expected.keys()
    wrong = []
    for part in ("model.visual", ""):
        names = [name for name in expected if name.startswith("model.visual") == bool(part)]
        total = torch.stack([expected[name].norm() for name in names]).norm() if names else torch.tensor(0.0)
        for name in names:
            error, scale = (found[name] - expected[name]).norm(), expected[name].norm()
            if not error <= RELATIVE * scale + OF_MODULE * total:
                wrong.append(f"{name}: |g - g_ref| = {error:.3e}, |g_ref| = {scale:.3e}, module {total:.3e}")
    assert not wrong, "\n".join(wrong)


MIXED = Samples(seed=1, without_images=(0, 1, 2, 3, 20, 21, 22, 23))  # replicas without images


CASES = [
    (name, factor)
    for name, (_, keys) in LAYOUTS.items()
    for factor in ([1, 2, 4, 5] if keys.get("use_mimo", True) else [1])
]


@pytest.mark.parametrize(("name", "factor"), CASES)
def test_gradients_equal_the_single_process(name: str, factor: int) -> None:
    world, keys = LAYOUTS[name]
    found = run_ranks(world, step_gradients, make_plan(world, **keys, **batch_keys(world, keys, factor)), MIXED)[0]
    compare(found, reference(MIXED))
