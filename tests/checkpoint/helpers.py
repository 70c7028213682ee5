"""Small Hugging Face folders, and the converter run on them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from flagscale.config.schema import ModelConfig
from flagscale.models.qwen35.hf_files import ShardWriter
from flagscale.plan.hf_config import hf_config_tree
from tests.models.tiny import pack_experts, random_weights, tiny_model, tiny_moe

DENSE = tiny_model(num_layers=2, full_attention_interval=2)
UNTIED = tiny_model(num_layers=2, full_attention_interval=2, untie_embeddings_and_output_weights=True)
EXPERTS = tiny_moe(num_layers=2, full_attention_interval=2, untie_embeddings_and_output_weights=True, num_experts=4)
MODELS = {"dense": DENSE, "untied": UNTIED, "experts": EXPERTS}


def write_hf(folder: Path, model: ModelConfig, shard_bytes: int = 100_000) -> dict[str, Tensor]:
    """A folder as a release has it: bfloat16 with A_log in fp32, packed experts, MTP's apart, a tokenizer file.

    Returns the tensors by their names in the files.
    """
    weights = {
        name: value if name.endswith("A_log") else value.bfloat16() for name, value in random_weights(model).items()
    }
    mtp = {name: value for name, value in weights.items() if name.startswith("mtp.")}
    stored = {**pack_experts({name: value for name, value in weights.items() if name not in mtp}), **mtp}
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, shard_bytes)
    for name, value in stored.items():
        writer.add(name, value)
    writer.close()
    (folder / "config.json").write_text(json.dumps(hf_config_tree(model)), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"made": "for tests"}', encoding="utf-8")
    (folder / "preprocessor_config.json").write_text("{}", encoding="utf-8")
    return stored


def write_yaml(folder: Path, model: ModelConfig) -> list[str]:
    """A YAML file with the model; returns the arguments that name it."""
    keys = {name: value for name, value in dataclasses.asdict(model).items() if name != "optimizer"}
    tree: dict[str, Any] = {"model": keys, "data": {"train_path": "unused"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return ["--config-name", "run", "--config-path", str(folder)]


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by their names in the files."""
    from safetensors.torch import load_file

    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
