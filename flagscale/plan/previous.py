"""The run that an experiment folder holds already, as far as it limits the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flagscale.config.errors import UserError
from flagscale.config.schema import Config, ModelConfig

ARCHITECTURE = (
    "name", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "vocab_size", "untie_embeddings_and_output_weights",
    "mtp_num_layers", "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "vision_num_layers", "vision_hidden_size", "vision_ffn_hidden_size", "vision_num_attention_heads",
    "vision_patch_size", "vision_temporal_patch_size", "vision_spatial_merge_size", "vision_num_position_embeddings",
    "rotary_base", "rotary_percent", "mrope_section", "vision_rotary_base",
)  # fmt: skip
"""Keys of `model` that decide which tensors a checkpoint holds, and how they are read."""
TRACES = ("checkpoints", "metrics.jsonl")
"""What a run leaves as soon as it trained; a plan alone (`action=dryrun`) binds nobody."""


def architecture_differences(config: Config, exp_dir: Path) -> dict[str, tuple[Any, Any]]:
    """Architecture keys whose value in the run that `exp_dir` holds differs: name -> (value there, value here).

    Empty when no run has trained there.

    Raises:
        UserError: when one has, and its `config.yaml` cannot be read.
    """
    previous = exp_dir / "config.yaml"
    if not previous.is_file() or not any((exp_dir / name).exists() for name in TRACES):
        return {}
    from omegaconf import OmegaConf

    try:
        model = OmegaConf.load(previous).model
        there = {name: model[name] for name in ARCHITECTURE if name in model}
    except Exception as error:  # a damaged file can fail in any way of the YAML reader
        raise UserError(
            f"{previous}: is no configuration of a run ({type(error).__name__}); choose another experiment.exp_dir, or "
            "remove the folder"
        ) from error
    assert set(ARCHITECTURE) <= set(ModelConfig.__dataclass_fields__)
    here = {name: getattr(config.model, name) for name in there}
    return {name: (there[name], here[name]) for name in there if there[name] != here[name]}
