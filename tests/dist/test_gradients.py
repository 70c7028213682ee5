"""Gradients of every parameter of both modules equal those of a single process, at any pair of grids.

The single process runs the same step code at world size 1; that one is held against transformers elsewhere
(`tests/models`, `tests/dist/test_step_reference.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from flagscale.plan.plan import ExperimentPlan
from flagscale.train import step as step_module
from tests.dist.harness import Samples, gradients_of_steps, make_plan
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
    "vit_dp4-llm_pp4": (4, {"pipeline_model_parallel_size": 4, "num_layers": 4}),
    "vit_tp2dp2-llm_dp4": (4, {"vision_tensor_model_parallel_size": 2}),
    "vit_tp2dp2-llm_tp2dp2": (4, {"vision_tensor_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
    "vit_dp6-llm_tp2dp3": (6, {"tensor_model_parallel_size": 2}),
    "unified-tp2dp2": (4, {"use_mimo": False, "tensor_model_parallel_size": 2}),
    "unified-tp2pp2": (4, {"use_mimo": False, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


def mostly_long(always: list[str], long: list[str]) -> list[Any]:
    """Parameters of a test: those that CI runs, and those that only `make test-long` runs."""
    return [*always, *(pytest.param(name, marks=pytest.mark.long) for name in long)]


def batch_keys(world: int, keys: dict[str, Any], factor: int) -> dict[str, Any]:
    """Batch keys that give this vit_batch_factor: 6 microbatches (4 at world 6) of 4 samples over the replicas."""
    language_dp = world // (keys.get("tensor_model_parallel_size", 1) * keys.get("pipeline_model_parallel_size", 1))
    micro_batch_size = max(4 // language_dp, 2 if language_dp == 3 else 1)
    found = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": micro_batch_size}
    if keys.get("use_mimo", True):
        vision_dp = world // keys.get("vision_tensor_model_parallel_size", 1)
        vision_micro, rest = divmod(factor * language_dp * micro_batch_size, vision_dp)
        assert rest == 0 < vision_micro, f"factor {factor} is not to be had with {keys}"
        found["vision_micro_batch_size"] = vision_micro
    return found


def factors(name: str) -> list[int]:
    """1, 2, 4, and one that does not divide the number of microbatches (4 and 5 for 6 of them, 3 for 4)."""
    world, keys = LAYOUTS[name]
    if not keys.get("use_mimo", True):
        return [1]
    return [1, 2, 3, 4] if world == 6 else [1, 2, 4, 5]


def model_keys(name: str) -> dict[str, Any]:
    """What a layout changes in the model: four stages want four layers."""
    return {key: value for key, value in LAYOUTS[name][1].items() if key == "num_layers"}


@cache
def reference(samples: Samples, **keys: Any) -> dict[str, torch.Tensor]:
    """Gradients of the same batch in one process."""
    plan = make_plan(1, global_batch_size=GLOBAL_BATCH, micro_batch_size=3, vision_micro_batch_size=6, **keys)
    return run_ranks(1, gradients_of_steps, [plan], samples)[0][0]


def compare(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], label: str, moved: dict[str, float] | None = None
) -> None:
    """Every parameter within |g - g_ref| <= 2e-5 |g_ref| + 5e-6 |module gradient|, or within `moved[name]`."""
    assert found.keys() == expected.keys(), label
    wrong = []
    for visual in (True, False):
        names = [name for name in expected if name.startswith("model.visual") == visual]
        total = torch.stack([expected[name].norm() for name in names]).norm() if names else torch.tensor(0.0)
        for name in names:
            error, scale = (found[name] - expected[name]).norm(), expected[name].norm()
            if not error <= max(RELATIVE * scale + OF_MODULE * total, (moved or {}).get(name, 0.0)):
                wrong.append(f"{label}: {name}: |g - g_ref| = {error:.3e}, |g_ref| = {scale:.3e}, module {total:.3e}")
    assert not wrong, "\n".join(wrong)


def check(name: str, samples: Samples, factors: list[int], **model: Any) -> None:
    """The gradients of a layout with these factors against the single process; `model` are keys of both."""
    world, keys = LAYOUTS[name]
    plans = [make_plan(world, **keys, **model, **batch_keys(world, keys, factor)) for factor in factors]
    assert [plan.batch.vit_batch_factor for plan in plans if plan.layout == "colocated"] in ([], factors)
    found = run_ranks(world, gradients_of_steps, plans, samples, timeout=240)[0]
    for factor, gradients in zip(factors, found, strict=True):
        compare(gradients, reference(samples, **model_keys(name), **model), f"{name} factor {factor}")


# Replicas without images, with factor 1 in a whole macro batch.
MIXED = Samples(seed=1, without_images=(0, 1, 2, 3, 20, 21, 22, 23))
NO_IMAGES = Samples(seed=2, images=(0,))


def half_of_factors(name: str, which: int) -> list[int]:
    """Every second factor of a layout; neighbouring layouts start with another one."""
    return factors(name)[(list(LAYOUTS).index(name) + which) % 2 :: 2]


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_equal_the_single_process(name: str) -> None:
    """Two factors of each layout; unified has one."""
    check(name, MIXED, half_of_factors(name, 0) or factors(name))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in LAYOUTS if len(factors(name)) > 1])
def test_gradients_with_the_other_factors(name: str) -> None:
    check(name, MIXED, half_of_factors(name, 1))


def without_extra_sums(plan: ExperimentPlan, samples: Samples) -> str:
    """Breaks the gradients on purpose: the norm on Gated DeltaNet's output is left to Megatron-Core.

    Returns:
        On rank 0 what is said of copies that differ.
    """
    with mock.patch.object(step_module, "extra_tp_sum_params", return_value=[]):
        try:
            gradients_of_steps([plan], samples)
        except AssertionError as error:
            return str(error)
    return ""


def test_upstream_alone_leaves_a_norm_wrong() -> None:
    """Negative control: without sequence parallelism Megatron-Core does not sum that norm's gradient over TP."""
    name = "vit_dp4-llm_tp2dp2"
    world, keys = LAYOUTS[name]
    said = run_ranks(world, without_extra_sums, make_plan(world, **keys, **batch_keys(world, keys, 2)), MIXED)[0]
    assert said.endswith("linear_attn.norm.weight differs")


@pytest.mark.parametrize("name", ["vit_dp4-llm_tp2dp2-sp", "vit_dp4-llm_tp2pp2", "vit_tp2dp2-llm_dp4"])
def test_a_batch_without_images(name: str) -> None:
    check(name, NO_IMAGES, [2])


@pytest.mark.parametrize("name", ["vit_dp4-llm_tp2pp2-sp", "vit_tp2dp2-llm_tp2dp2"])
@pytest.mark.parametrize(
    "keys",
    [{"untie_embeddings_and_output_weights": True}, {"mtp_num_layers": 0}],
    ids=["untied", "without-mtp"],
)
def test_other_heads(name: str, keys: dict[str, Any]) -> None:
    """Output weights of their own, and no multi-token prediction."""
    check(name, MIXED, [2], **keys)


FROZEN = {
    "vision": {"freeze_vision": True},
    "encoder": {"freeze_vision": True, "freeze_merger": True},
    "merger": {"freeze_merger": True},
    "language": {"freeze_language": True},
    "all-but-merger": {"freeze_vision": True, "freeze_language": True},
}


@pytest.mark.parametrize(
    "name", mostly_long(["vit_dp4-llm_tp2pp2-sp"], ["vit_dp4-llm_tp2dp2", "vit_tp2dp2-llm_tp2dp2"])
)
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parts(name: str, frozen: str) -> None:
    """The other parts' gradients are unchanged, with microbatches of text alone among the others."""
    check(name, MIXED, [4], **FROZEN[frozen])
    whole = reference(MIXED)
    part = reference(MIXED, **FROZEN[frozen])
    assert part
    compare(part, {key: whole[key] for key in part}, f"frozen {frozen}")
