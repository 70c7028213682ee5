"""Equality with transformers: rows, logits, losses and gradients of the same weights, at every layout."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from flagscale.config.schema import ModelConfig
from tests.dist.pool import run_ranks
from tests.models.ranks import built, full_step
from tests.models.tiny import Batch, Piece, Reference, make_batch, random_weights, tiny_model, tiny_moe, unpack_experts

KINDS: dict[str, list[list[Piece]]] = {
    "text": [[11], [7]],
    "one image": [[5, (4, 6), 3]],
    "unequal images": [[5, (4, 6), 7], [3, (2, 2), 2, (6, 4), 4], [9]],
    "video": [[4, (3, 4, 2), 3]],
    "image before video": [[2, (4, 4), 3, (2, 2, 6), 5]],
    "no padding": [[5, (4, 4), 1], [4, (2, 4), 4]],
    "left padding": [[5, (4, 6), 7], [3, (2, 2), 2], [9]],
}
SINGLE = {"tp": 1, "pp": 1, "vtp": 1, "sp": False}
LAYOUTS = [
    {"tp": 2, "pp": 1, "vtp": 1, "sp": False},
    {"tp": 2, "pp": 1, "vtp": 2, "sp": True},
    {"tp": 4, "pp": 1, "vtp": 2, "sp": False},  # more ranks than KV groups
    {"tp": 4, "pp": 1, "vtp": 4, "sp": True},
    {"tp": 1, "pp": 2, "vtp": 1, "sp": False},
    {"tp": 2, "pp": 2, "vtp": 1, "sp": True},
]


MOE_LAYOUTS = [
    {"tp": 1, "pp": 1, "vtp": 1, "sp": False, "ep": 2},
    {"tp": 2, "pp": 1, "vtp": 1, "sp": True, "ep": 1},
    {"tp": 2, "pp": 1, "vtp": 2, "sp": True, "ep": 2},
    {"tp": 1, "pp": 2, "vtp": 1, "sp": False, "ep": 2},
    {"tp": 4, "pp": 1, "vtp": 1, "sp": True, "ep": 2},  # an expert on two ranks, more ranks than KV groups
]


@functools.cache
def reference(
    kind: str, tied: bool, mtp: bool, moe: bool = False
) -> tuple[ModelConfig, dict[str, Tensor], Batch, dict[str, Any]]:
    """The model, its weights, a batch, and what transformers makes of them."""
    make = tiny_moe if moe else tiny_model
    model = make(mtp_num_layers=int(mtp), untie_embeddings_and_output_weights=not tied)
    weights = random_weights(model)
    batch = make_batch(model, KINDS[kind], left=kind == "left padding", multiple=4)
    hf = Reference(model, weights)
    out = hf(batch)
    loss = (out["lm"] * batch.loss_mask_BS).sum()
    if mtp:
        loss = loss + (out["mtp"] * batch.mtp_mask_BS).sum()
    loss.backward()
    expected: dict[str, Any] = {key: None if value is None else value.detach() for key, value in out.items()}
    expected["gradients"] = unpack_experts({name: p.grad for name, p in hf.named_parameters() if p.grad is not None})
    return model, weights, batch, expected


def relative(mine: Tensor, other: Tensor) -> float:
    """Distance of two tensors over the length of the second."""
    return float((mine - other).norm() / other.norm().clamp(min=1e-12))


LIMITS = {"rows": 1e-5, "logits": 1e-4, "loss": 1e-4, "mtp_loss": 1e-4, "gradients": 1e-4, "decay": 1e-3}


def limit(name: str) -> float:
    """Allowed relative distance of a gradient; those of A_log and dt_bias are small sums of large terms."""
    return LIMITS[_kind(name)]


def _kind(name: str) -> str:
    return "decay" if name.endswith(("A_log", "dt_bias")) else "gradients"


def differences(
    results: list[dict[str, Any]], batch: Batch, expected: dict[str, Any], tp: int
) -> dict[str, tuple[float, str]]:
    """The largest difference of each kind in `LIMITS`, and where it is; kinds that the ranks do not return are absent.

    Rows, logits and losses: absolute. Gradients: relative to the parameter's own; of A_log and dt_bias apart.
    """
    found: dict[str, tuple[float, str]] = {}

    def note(kind: str, value: float, where: str) -> None:
        assert value == value, (kind, where)
        found[kind] = max(found.get(kind, (0.0, where)), (value, where))

    real_BS1 = batch.attention_mask_BS.unsqueeze(-1)
    for rank, result in enumerate(results):
        if expected["rows"] is not None and result["rows"] is not None:
            note("rows", float((result["rows"] - expected["rows"]).abs().max()), f"rank {rank}")
        if result["logits"] is not None:
            note("logits", float(((result["logits"] - expected["logits"]) * real_BS1).abs().max()), f"rank {rank}")
        if result["losses"] is not None:
            lm_BS, mtp_BS = result["losses"]
            note("loss", float(((lm_BS - expected["lm"]) * batch.loss_mask_BS).abs().max()), f"rank {rank}")
            if expected["mtp"] is not None:
                apart_BS = (mtp_BS - expected["mtp"]) * batch.mtp_mask_BS
                note("mtp_loss", float(apart_BS.abs().max()), f"rank {rank}")
    gradients = _whole_gradients(results, tp)
    for name, gradient in expected["gradients"].items():
        note(_kind(name), relative(gradients[name], gradient), name)
    return found


def _whole_gradients(results: list[dict[str, Any]], tp: int) -> dict[str, Tensor]:
    """Gradients of the whole model from those of its ranks; an expert's is complete on the rank that has it."""
    gradients = {
        name: value for result in results for name, value in result["gradients"].items() if ".experts." in name
    }
    for result in results[::tp]:
        for name, gradient in result["gradients"].items():
            if ".experts." in name:
                continue
            # Stages return their own parts; both copies of a tied embedding count.
            again = name in gradients and not name.startswith("model.visual.")
            gradients[name] = gradients[name] + gradient if again else gradient
    return gradients


def compare(results: list[dict[str, Any]], batch: Batch, expected: dict[str, Any], tp: int) -> None:
    """Everything that the ranks return against transformers."""
    found = differences(results, batch, expected, tp)
    assert {"logits", "loss", "gradients"} <= found.keys()  # of the last stage, whichever rank has it
    for kind, (value, where) in found.items():
        assert value <= LIMITS[kind], (kind, value, where)


def of_replica(results: list[dict[str, Any]], layout: dict[str, Any], replica: int) -> list[dict[str, Any]]:
    """Results of one data parallel replica, which has run the whole batch, with the experts that lie elsewhere."""
    tp = layout["tp"]
    replicas = len(results) // tp // layout["pp"]
    mine = [result for rank, result in enumerate(results) if rank // tp % replicas == replica]
    experts = {name: value for r in results for name, value in r["gradients"].items() if ".experts." in name}
    return [{**mine[0], "gradients": {**mine[0]["gradients"], **experts}}, *mine[1:]]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "-".join(f"{key}{int(x[key])}" for key in x))
def test_every_layout_equals_transformers(layout: dict[str, Any]) -> None:
    model, weights, batch, expected = reference("unequal images", tied=True, mtp=True)
    model = dataclasses.replace(model, sequence_parallel=layout["sp"])
    results = run_ranks(layout["tp"] * layout["pp"], full_step, model, weights, batch, layout, timeout=120.0)
    compare(results, batch, expected, layout["tp"])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_batch_equals_transformers(kind: str) -> None:
    model, weights, batch, expected = reference(kind, tied=False, mtp=kind != "left padding")
    compare(run_ranks(1, full_step, model, weights, batch, SINGLE, timeout=120.0), batch, expected, 1)


# Kinds of batch that meet other code on split ranks: no image, frame groups after an image, a mask.
SPLIT_KINDS = ["text", "image before video", "left padding"]


@pytest.mark.parametrize("kind", SPLIT_KINDS)
@pytest.mark.parametrize("number", [2, 5])
def test_every_kind_of_batch_on_split_ranks(number: int, kind: str) -> None:
    """More ranks than KV groups with a split encoder, and both ways at once."""
    layout = LAYOUTS[number]
    model, weights, batch, expected = reference(kind, tied=False, mtp=kind != "left padding")
    model = dataclasses.replace(model, sequence_parallel=layout["sp"])
    results = run_ranks(layout["tp"] * layout["pp"], full_step, model, weights, batch, layout, timeout=120.0)
    compare(results, batch, expected, layout["tp"])


@pytest.mark.parametrize("kind", SPLIT_KINDS)
def test_every_kind_of_batch_with_experts_on_split_ranks(kind: str) -> None:
    layout = MOE_LAYOUTS[2]
    model, weights, batch, expected = reference(kind, tied=False, mtp=kind != "left padding", moe=True)
    model = dataclasses.replace(model, sequence_parallel=layout["sp"])
    results = run_ranks(layout["tp"], full_step, model, weights, batch, layout, timeout=120.0)
    compare(of_replica(results, layout, 0), batch, expected, layout["tp"])


@pytest.mark.parametrize("layout", MOE_LAYOUTS, ids=lambda x: "-".join(f"{key}{int(x[key])}" for key in x))
def test_experts_at_every_layout_equal_transformers(layout: dict[str, Any]) -> None:
    model, weights, batch, expected = reference("unequal images", tied=False, mtp=True, moe=True)
    model = dataclasses.replace(model, sequence_parallel=layout["sp"])
    world = max(layout["tp"], layout["ep"]) * layout["pp"]
    results = run_ranks(world, full_step, model, weights, batch, layout, timeout=120.0)
    for replica in range(world // layout["pp"] // layout["tp"]):
        compare(of_replica(results, layout, replica), batch, expected, layout["tp"])


def test_the_balancing_loss_is_transformers_own() -> None:
    """Per layer and sample, over its own tokens, the weight divided by the number of experts of a token.

    In MTP's layer over those tokens that have a next one.
    """
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter, load_balancing_loss_func

    base, weights, batch, plain = reference("unequal images", tied=False, mtp=True, moe=True)
    size, length = batch.input_ids_BS.shape
    lengths = batch.attention_mask_BS.sum(1).tolist()
    assert min(lengths) < length, "nothing is padded"
    model = dataclasses.replace(base, moe_aux_loss_coeff=30.0, global_batch_size=size)
    hf, logits = Reference(model, weights), []
    for router in (module for module in hf.modules() if isinstance(module, Qwen3_5MoeTopKRouter)):
        router.register_forward_hook(lambda module, args, out: logits.append(out[0].view(size, length, -1)))
    out = hf(batch)
    loss = (out["lm"] * batch.loss_mask_BS).sum() + (out["mtp"] * batch.mtp_mask_BS).sum()
    assert len(logits) == model.num_layers + 1
    total = 0.0
    for number, layer in enumerate(logits):
        for sample, tokens in zip(layer, lengths, strict=True):
            counted = sample[: tokens - int(number == model.num_layers)]
            total = total + load_balancing_loss_func((counted,), model.num_experts, model.moe_router_topk)
    total = total / model.moe_router_topk
    loss = loss + model.moe_aux_loss_coeff * total / size
    loss.backward()
    named = {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}
    expected = {**plain, "gradients": unpack_experts(named)}
    router = "model.language_model.layers.0.mlp.gate.weight"
    assert relative(expected["gradients"][router], plain["gradients"][router]) > 0.01, "the loss does not show"
    results = run_ranks(1, full_step, model, weights, batch, SINGLE, timeout=120.0)
    compare(results, batch, expected, 1)
    assert results[0]["balance"] == pytest.approx(float(total), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_batch_with_experts_equals_transformers(kind: str) -> None:
    model, weights, batch, expected = reference(kind, tied=False, mtp=kind != "left padding", moe=True)
    compare(run_ranks(1, full_step, model, weights, batch, SINGLE, timeout=120.0), batch, expected, 1)


def test_untied_weights_over_stages_equal_transformers() -> None:
    model, weights, batch, expected = reference("one image", tied=False, mtp=True)
    layout = {"tp": 1, "pp": 2, "vtp": 1}
    compare(run_ranks(2, full_step, model, weights, batch, layout, timeout=120.0), batch, expected, 1)


def test_a_gradient_without_its_sum_over_tp_is_seen() -> None:
    """The sums of `tp_sum_params` are needed, and the limits above are tight enough to tell."""
    model, weights, batch, expected = reference("unequal images", tied=True, mtp=True)
    layout = {"tp": 2, "pp": 1, "vtp": 1}
    gradients = run_ranks(2, full_step, model, weights, batch, layout, False, timeout=120.0)[0]["gradients"]
    wrong = {name for name, value in expected["gradients"].items() if relative(gradients[name], value) > limit(name)}
    assert {name.rsplit(".", 2)[-2] for name in wrong} == {"norm", "q_norm", "k_norm"}
    assert all("linear_attn.norm" in name for name in wrong if name.endswith(".norm.weight"))


def router_dtypes(model: ModelConfig) -> list[tuple[Any, Any, Any]]:
    """Dtypes of each router of a bfloat16 model: weight, logits, probabilities. On a rank of the pool."""
    from flagscale.models.qwen35.experts import BalancedRouter

    with built(model, {**SINGLE, "bf16": True}) as (language, _, _):
        routers = [module for module in language.modules() if isinstance(module, BalancedRouter)]
        hidden_SBD = torch.randn(4, 1, model.hidden_size, dtype=torch.bfloat16)
        return [
            (router.weight.dtype, router.gating(hidden_SBD).dtype, router(hidden_SBD)[0].dtype) for router in routers
        ]


def test_routers_compute_in_fp32() -> None:
    """Weights and inputs in bfloat16, logits and probabilities not: rounded ones choose other experts."""
    model = tiny_moe()
    found = run_ranks(1, router_dtypes, model, timeout=120.0)[0]
    assert found == [(torch.bfloat16, torch.float32, torch.float32)] * (model.num_layers + 1)


def test_bfloat16_is_near_fp32() -> None:
    """Losses within bfloat16's rounding (8 bits), all gradients there and finite."""
    model, weights, batch, expected = reference("unequal images", tied=True, mtp=True)
    result = run_ranks(1, full_step, model, weights, batch, {**SINGLE, "bf16": True}, timeout=120.0)[0]
    for mine, other, mask in zip(
        result["losses"], (expected["lm"], expected["mtp"]), (batch.loss_mask_BS, batch.mtp_mask_BS), strict=True
    ):
        assert mine.dtype == other.dtype
        assert (mine * mask).sum() == pytest.approx((other * mask).sum(), rel=2**-6)
    assert result["gradients"].keys() == expected["gradients"].keys()
    assert all(value.isfinite().all() for value in result["gradients"].values())
