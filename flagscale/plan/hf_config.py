"""`config.json` of transformers' Qwen3.5 out of this project's `ModelConfig`, and what a given one disagrees in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flagscale.config.errors import UserError
from flagscale.config.schema import ModelConfig

LINEAR, FULL = "linear_attention", "full_attention"


def hf_config_tree(model: ModelConfig) -> dict[str, Any]:
    """The whole `config.json`, as transformers' `Qwen3_5Config` or `Qwen3_5MoeConfig` reads it."""
    kind, tied = ("qwen3_5_moe" if model.num_experts else "qwen3_5"), not model.untie_embeddings_and_output_weights
    family = "Qwen3_5MoeForConditionalGeneration" if model.num_experts else "Qwen3_5ForConditionalGeneration"
    return {
        "architectures": [family],
        "model_type": kind,
        "image_token_id": model.image_token_id,
        "video_token_id": model.video_token_id,
        "vision_start_token_id": model.vision_start_token_id,
        "vision_end_token_id": model.vision_end_token_id,
        "tie_word_embeddings": tied,
        "text_config": _text(model, f"{kind}_text", tied),
        "vision_config": _vision(model, f"{kind}_vision"),
    }


def read_hf_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face folder.

    Raises:
        UserError: it is missing or no JSON object.
    """
    path = folder / "config.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a folder as saved by transformers") from error
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}); copy the file again") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: is not a JSON object; copy the file again")
    return tree


def check_hf_config(folder: Path, model: ModelConfig) -> None:
    """Refuses a folder that holds another model.

    Raises:
        UserError: `config.json` is of another architecture, or of another size; all differences are named.
    """
    expected, found = hf_config_tree(model), read_hf_config(folder)
    if found.get("model_type") != expected["model_type"]:
        raise UserError(
            f"{folder / 'config.json'}: model_type is {found.get('model_type')!r}, the model config describes "
            f"{expected['model_type']!r}; take the weights of a Qwen3.5, or the model config that belongs to these"
        )
    differences = [
        f"{key} is {theirs} there and {ours} in the model config" for key, ours, theirs in _differences(expected, found)
    ]
    if differences:
        raise UserError(
            f"{folder / 'config.json'}: {'; '.join(differences)}; take the model config that belongs to these weights"
        )


def _differences(expected: dict[str, Any], found: dict[str, Any], home: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Keys of both with different values; what a file leaves out has transformers' default, which is not judged."""
    for key, ours in expected.items():
        if key in ("architectures", "model_type", "max_position_embeddings") or key not in found:
            continue
        theirs = found[key]
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from _differences(ours, theirs, f"{home}{key}.")
        elif ours != theirs:
            yield f"{home}{key}", ours, theirs


def _text(model: ModelConfig, kind: str, tied: bool) -> dict[str, Any]:
    layers = range(1, model.num_layers + 1)
    tree = {
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": model.norm_epsilon,
        "max_position_embeddings": model.max_position_embeddings,
        "linear_conv_kernel_dim": model.linear_conv_kernel_dim,
        "linear_key_head_dim": model.linear_key_head_dim,
        "linear_value_head_dim": model.linear_value_head_dim,
        "linear_num_key_heads": model.linear_num_key_heads,
        "linear_num_value_heads": model.linear_num_value_heads,
        "full_attention_interval": model.full_attention_interval,
        "layer_types": [LINEAR if layer % model.full_attention_interval else FULL for layer in layers],
        "mtp_num_hidden_layers": model.mtp_num_layers,
        "tie_word_embeddings": tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": model.rotary_base,
            "partial_rotary_factor": model.rotary_percent,
            "mrope_section": list(model.mrope_section),
            "mrope_interleaved": True,
        },
    }
    if not model.num_experts:
        return {**tree, "intermediate_size": model.ffn_hidden_size}
    return {
        **tree,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
    }


def _vision(model: ModelConfig, kind: str) -> dict[str, Any]:
    return {
        "model_type": kind,
        "depth": model.vision_num_layers,
        "hidden_size": model.vision_hidden_size,
        "intermediate_size": model.vision_ffn_hidden_size,
        "num_heads": model.vision_num_attention_heads,
        "in_channels": 3,
        "patch_size": model.vision_patch_size,
        "temporal_patch_size": model.vision_temporal_patch_size,
        "spatial_merge_size": model.vision_spatial_merge_size,
        "num_position_embeddings": model.vision_num_position_embeddings,
        "out_hidden_size": model.hidden_size,
    }
