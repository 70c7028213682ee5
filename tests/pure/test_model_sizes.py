"""The configurations of the released sizes: parameter counts against the public table, without building a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flagscale.config.build import build_config
from flagscale.config.rules import field_errors
from flagscale.config.schema import Config, ModelConfig
from flagscale.plan.flops import language_flops
from flagscale.plan.layout import Grid
from flagscale.plan.params import active_parameters, parameter_counts
from flagscale.plan.rules import world_errors

FOLDER = Path(__file__).resolve().parents[2] / "configs/model"
# Parameters without MTP, in all and of the ViT with merger, and whether the embedding is the output layer.
SIZES: dict[str, tuple[float, float | None, bool]] = {
    "0.8b": (0.853e9, 100.6e6, True),
    "2b": (2.213e9, 331.4e6, True),
    "4b": (4.539e9, 333.5e6, True),
    "9b": (9.410e9, 456.0e6, False),
    "27b": (27.357e9, 460.7e6, False),
    "35b_a3b": (35.107e9, None, False),
    "122b_a10b": (122.563e9, None, False),
    "397b_a17b": (396.802e9, None, False),
}
ACTIVE = {"35b_a3b": 3e9, "122b_a10b": 10e9, "397b_a17b": 17e9}


def model_of(path: Path) -> ModelConfig:
    """The model of a file of configs/model."""
    return ModelConfig(**yaml.safe_load(path.read_text(encoding="utf-8")))


def config_of(model: dict[str, object], ranks: int = 8) -> Config:
    """A configuration around model keys."""
    tree = {"model": model, "data": {"train_path": __file__}, "experiment": {"runner": {"nproc_per_node": ranks}}}
    return build_config(tree)


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_are_those_of_the_table(size: str) -> None:
    whole, visual, tied = SIZES[size]
    model = model_of(FOLDER / f"qwen35_{size}.yaml")
    counts = parameter_counts(model)
    assert sum(counts.values()) - counts["mtp"] == pytest.approx(whole, rel=1e-3)
    if visual is not None:
        assert counts["vision"] + counts["merger"] == pytest.approx(visual, rel=1e-3)
    assert model.untie_embeddings_and_output_weights is not tied
    assert model.mtp_num_layers == 1


@pytest.mark.parametrize("size", ["122b_a10b", "397b_a17b"])
def test_sizes_from_one_source_say_so(size: str) -> None:
    remarks = [line for line in (FOLDER / f"qwen35_{size}.yaml").read_text().splitlines() if line.startswith("#")]
    assert any("one public source" in line for line in remarks)
    assert any("not confirmed" in line for line in remarks)


@pytest.mark.parametrize("size", ACTIVE)
def test_a_token_meets_as_many_parameters_and_flops_as_the_name_says(size: str) -> None:
    model = model_of(FOLDER / f"qwen35_{size}.yaml")
    active = active_parameters(model)
    assert active == pytest.approx(ACTIVE[size], rel=0.18)
    # Two FLOPs a parameter but the embedding's, which is looked up; the delta rule adds up to 3 %.
    products = 2 * (active - model.vocab_size * model.hidden_size)
    assert products <= language_flops(model, 1, 1) <= 1.04 * products


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_model_file_keeps_the_rules(path: Path) -> None:
    config = config_of(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert [str(error) for error in field_errors(config) if "model." in str(error)] == []


MOE = {**yaml.safe_load((FOLDER / "qwen35_tiny_moe.yaml").read_text(encoding="utf-8")), "sequence_parallel": True}
MISTAKES = [
    ({"ffn_hidden_size": 64}, "ffn_hidden_size", "no effect with num_experts 8"),
    ({"moe_ffn_hidden_size": 0}, "moe_ffn_hidden_size", "at least 1 with num_experts 8"),
    ({"moe_router_topk": 9}, "moe_router_topk", "at most num_experts 8"),
    ({"moe_router_topk": 1}, "moe_router_topk", "at least 2"),
    ({"num_experts": 0}, "ffn_hidden_size", "at least 1 in a model without experts"),
    ({"num_experts": 0}, "moe_router_topk", "no effect with num_experts 0"),
    ({"tensor_model_parallel_size": 2, "sequence_parallel": False}, "sequence_parallel", "must be true"),
    ({"expert_model_parallel_size": 3}, "expert_model_parallel_size", "must divide num_experts 8 and the 8 ranks"),
    (
        {"expert_model_parallel_size": 8, "pipeline_model_parallel_size": 2},
        "expert_model_parallel_size",
        "the 4 ranks of a pipeline stage",
    ),
]


@pytest.mark.parametrize(("keys", "key", "rule"), MISTAKES)
def test_mistakes_with_experts_are_named(keys: dict[str, object], key: str, rule: str) -> None:
    config = config_of(MOE | {"seq_length": 1024} | keys)
    messages = [str(error) for error in (*field_errors(config), *world_errors(config))]
    assert any(f"model.{key}" in message and rule in message for message in messages), messages


def test_expert_groups_are_neighbours_of_a_stage() -> None:
    assert Grid(tp=2, dp=2, pp=2, ep=2).expert_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Grid(tp=2, dp=2, ep=4).expert_groups() == [[0, 1, 2, 3]]
