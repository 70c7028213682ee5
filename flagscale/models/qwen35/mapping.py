"""Which rows of which Hugging Face tensors each Megatron parameter holds, at any tensor parallel size.

Every parameter is a selection of the rows (or, for row-parallel linears, columns) of its Hugging Face tensors laid
one after the other. So a mapping is a list of names and an index; loading selects by it, gathering scatters by it, and
both are exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flagscale.config.schema import ModelConfig
from flagscale.models.qwen35.canonical import EMBEDDING, TEXT, VISUAL, is_full_attention
from flagscale.plan.layout import VISION

Rows = Callable[[int, int], Tensor]  # (tensor parallel rank, size) -> index


@dataclass(frozen=True, slots=True)
class ParameterMap:
    """One parameter in terms of Hugging Face tensors.

    Attributes:
        names: the tensors, laid one after the other along `dim`.
        index: (tp_rank, tp_size) -> the positions along `dim` that the rank holds, in its order; None: all of them,
            on every rank.
        dim: 0 rows, 1 columns.
    """

    names: tuple[str, ...]
    index: Rows | None = None
    dim: int = 0


def parameter_map(name: str, model: ModelConfig, layer_offset: int = 0, expert_offset: int = 0) -> ParameterMap:
    """The mapping of a parameter by its name in `VisionEncoder` or `LanguageModel`.

    Args:
        name: as in `named_parameters()`.
        layer_offset: decoder layers before this pipeline stage.
        expert_offset: experts of a layer on lower expert parallel ranks.

    Raises:
        KeyError: a parameter that this model should not have; loading would leave it uninitialised.
    """
    name = _with_global_expert(name, expert_offset)
    if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
        layer = int(match[1]) + layer_offset
        return _decoder_layer(f"{TEXT}layers.{layer}.", match[2], model, is_full_attention(model, layer))
    if match := re.fullmatch(r"mtp\.layers\.(\d+)\.mtp_model_layer\.(.*)", name):
        return _decoder_layer(f"mtp.layers.{match[1]}.", match[2], model, attention=True)
    if match := re.fullmatch(r"blocks\.layers\.(\d+)\.(.*)", name):
        return _vision_block(f"{VISUAL}blocks.{match[1]}.", model)[match[2]]
    return _outside_layers(model)[name]


def parameter_names(model: ModelConfig, module: str) -> list[str]:
    """Names of all parameters of a module on a single rank, without building it: in the order of its layers.

    A tied output layer has no parameter of its own. Experts are those of `SequentialMLP`.
    """
    if module == VISION:
        blocks = [f"blocks.layers.{n}." for n in range(model.vision_num_layers)]
        names = [block + name for block in blocks for name in _vision_block("", model)]
        return ["patch_embed.weight", "patch_embed.bias", "position_table", *names, *_merger(model)]
    names = ["embedding.word_embeddings.weight"]
    for n in range(model.num_layers):
        names += [f"decoder.layers.{n}.{name}" for name in _layer_names(model, is_full_attention(model, n))]
    names.append("decoder.final_layernorm.weight")
    for n in range(model.mtp_num_layers):
        layer = f"mtp.layers.{n}."
        names += [layer + name for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight")]
        names += [f"{layer}mtp_model_layer.{name}" for name in _layer_names(model, attention=True)]
        names.append(layer + "final_layernorm.weight")
    if model.untie_embeddings_and_output_weights:
        names.append("output_layer.weight")
    return names


def _layer_names(model: ModelConfig, attention: bool) -> list[str]:
    experts = [f"mlp.experts.local_experts.{n}.linear_fc{m}.weight" for m in (1, 2) for n in range(model.num_experts)]
    return [*_layer_maps("", model, attention), *experts]


def _with_global_expert(name: str, offset: int) -> str:
    """`mlp.experts.N.linear_fc1.weight`, N counted over all ranks, whichever class of Megatron-Core holds experts."""
    one_each = re.fullmatch(r"(.*\.experts\.)local_experts\.(\d+)\.(linear_fc[12]\.weight)", name)
    grouped = re.fullmatch(r"(.*\.experts\.)(linear_fc[12]\.weight)(\d+)", name)
    if one_each:
        return f"{one_each[1]}{int(one_each[2]) + offset}.{one_each[3]}"
    if grouped:
        return f"{grouped[1]}{int(grouped[3]) + offset}.{grouped[2]}"
    return name


def _outside_layers(model: ModelConfig) -> dict[str, ParameterMap]:
    return {
        "embedding.word_embeddings.weight": _split(EMBEDDING, model.vocab_size),
        "output_layer.weight": _split(
            "lm_head.weight" if model.untie_embeddings_and_output_weights else EMBEDDING, model.vocab_size
        ),
        "decoder.final_layernorm.weight": _whole(TEXT + "norm.weight"),
        "mtp.layers.0.enorm.weight": _whole("mtp.pre_fc_norm_embedding.weight"),
        "mtp.layers.0.hnorm.weight": _whole("mtp.pre_fc_norm_hidden.weight"),
        "mtp.layers.0.final_layernorm.weight": _whole("mtp.norm.weight"),
        "mtp.layers.0.eh_proj.weight": _split("mtp.fc.weight", model.hidden_size),
        "patch_embed.weight": _whole(VISUAL + "patch_embed.proj.weight"),
        "patch_embed.bias": _whole(VISUAL + "patch_embed.proj.bias"),
        "position_table": _whole(VISUAL + "pos_embed.weight"),
        **_merger(model),
    }


def _merger(model: ModelConfig) -> dict[str, ParameterMap]:
    merged = model.vision_hidden_size * model.vision_spatial_merge_size**2
    return {
        "merger.norm.weight": _whole(VISUAL + "merger.norm.weight"),
        "merger.norm.bias": _whole(VISUAL + "merger.norm.bias"),
        "merger.linear_fc1.weight": _split(VISUAL + "merger.linear_fc1.weight", merged),
        "merger.linear_fc1.bias": _split(VISUAL + "merger.linear_fc1.bias", merged),
        "merger.linear_fc2.weight": _split(VISUAL + "merger.linear_fc2.weight", merged, dim=1),
        "merger.linear_fc2.bias": _whole(VISUAL + "merger.linear_fc2.bias"),
    }


def _decoder_layer(layer: str, name: str, model: ModelConfig, attention: bool) -> ParameterMap:
    if match := re.fullmatch(r"mlp\.experts\.(\d+)\.linear_fc([12])\.weight", name):
        assert int(match[1]) < model.num_experts, name
        expert = f"{layer}mlp.experts.{match[1]}."
        parts = ("gate_proj", "up_proj") if match[2] == "1" else ("down_proj",)
        return ParameterMap(tuple(f"{expert}{part}.weight" for part in parts))
    return _layer_maps(layer, model, attention)[name]


def _layer_maps(layer: str, model: ModelConfig, attention: bool) -> dict[str, ParameterMap]:
    """All parameters of a decoder layer but its routed experts."""
    maps = {
        "input_layernorm.weight": _whole(layer + "input_layernorm.weight"),
        "pre_mlp_layernorm.weight": _whole(layer + "post_attention_layernorm.weight"),
    }
    if model.num_experts:
        maps["mlp.router.weight"] = _whole(layer + "mlp.gate.weight")
        maps["mlp.shared_experts.gate_weight"] = _whole(layer + "mlp.shared_expert_gate.weight")
        shared = model.moe_shared_expert_intermediate_size
        maps.update(_gated_mlp("mlp.shared_experts.", layer + "mlp.shared_expert.", shared))
    else:
        maps.update(_gated_mlp("mlp.", layer + "mlp.", model.ffn_hidden_size))
    maps.update(_attention(layer, model) if attention else _delta_net(layer, model))
    return maps


def _gated_mlp(name: str, hf: str, width: int) -> dict[str, ParameterMap]:
    return {
        name + "linear_fc1.weight": ParameterMap(
            (hf + "gate_proj.weight", hf + "up_proj.weight"), _sections([width] * 2)
        ),
        name + "linear_fc2.weight": _split(hf + "down_proj.weight", width, dim=1),
    }


def _attention(layer: str, model: ModelConfig) -> dict[str, ParameterMap]:
    hf = layer + "self_attn."
    return {
        "self_attention.linear_qkv.weight": ParameterMap(
            (hf + "q_proj.weight", hf + "k_proj.weight", hf + "v_proj.weight"), _gated_qkv(model)
        ),
        "self_attention.linear_proj.weight": _split(
            hf + "o_proj.weight", model.num_attention_heads * model.kv_channels, dim=1
        ),
        "self_attention.q_layernorm.weight": _whole(hf + "q_norm.weight"),
        "self_attention.k_layernorm.weight": _whole(hf + "k_norm.weight"),
    }


def _delta_net(layer: str, model: ModelConfig) -> dict[str, ParameterMap]:
    hf, heads = layer + "linear_attn.", model.linear_num_value_heads
    keys, values = model.linear_num_key_heads * model.linear_key_head_dim, heads * model.linear_value_head_dim
    projections = tuple(f"{hf}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    return {
        # Each rank holds its own [q | k | v | z | b | a]: a slice of every section, not of the whole.
        "self_attention.in_proj.weight": ParameterMap(
            projections, _sections([keys, keys, values, values, heads, heads])
        ),
        "self_attention.conv1d.weight": ParameterMap((hf + "conv1d.weight",), _sections([keys, keys, values])),
        "self_attention.A_log": _split(hf + "A_log", heads),
        "self_attention.dt_bias": _split(hf + "dt_bias", heads),
        "self_attention.out_norm.weight": _whole(hf + "norm.weight"),
        "self_attention.out_proj.weight": _split(hf + "out_proj.weight", values, dim=1),
    }


def _vision_block(block: str, model: ModelConfig) -> dict[str, ParameterMap]:
    width, ffn = model.vision_hidden_size, model.vision_ffn_hidden_size
    qkv = _interleaved_qkv(model.vision_num_attention_heads, width)
    return {
        "input_layernorm.weight": _whole(block + "norm1.weight"),
        "input_layernorm.bias": _whole(block + "norm1.bias"),
        "pre_mlp_layernorm.weight": _whole(block + "norm2.weight"),
        "pre_mlp_layernorm.bias": _whole(block + "norm2.bias"),
        "self_attention.linear_qkv.weight": ParameterMap((block + "attn.qkv.weight",), qkv),
        "self_attention.linear_qkv.bias": ParameterMap((block + "attn.qkv.bias",), qkv),
        "self_attention.linear_proj.weight": _split(block + "attn.proj.weight", width, dim=1),
        "self_attention.linear_proj.bias": _whole(block + "attn.proj.bias"),
        "mlp.linear_fc1.weight": _split(block + "mlp.linear_fc1.weight", ffn),
        "mlp.linear_fc1.bias": _split(block + "mlp.linear_fc1.bias", ffn),
        "mlp.linear_fc2.weight": _split(block + "mlp.linear_fc2.weight", ffn, dim=1),
        "mlp.linear_fc2.bias": _whole(block + "mlp.linear_fc2.bias"),
    }


def _whole(name: str) -> ParameterMap:
    return ParameterMap((name,))


def _split(name: str, size: int, dim: int = 0) -> ParameterMap:
    return ParameterMap((name,), _sections([size]), dim)


def _sections(sizes: list[int]) -> Rows:
    """An equal slice of each of several consecutive sections."""

    def index(rank: int, ranks: int) -> Tensor:
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        return torch.cat(
            [
                torch.arange(start + rank * size // ranks, start + (rank + 1) * size // ranks)
                for start, size in zip(starts, sizes, strict=True)
            ]
        )

    return index


def _gated_qkv(model: ModelConfig) -> Rows:
    """Megatron's rows per KV group [query heads | gate heads | key | value] out of [q_proj; k_proj; v_proj].

    q_proj has per head [query | gate]. With more ranks than groups a rank holds a part of a group's rows.
    """
    heads, groups, dim = model.num_attention_heads, model.num_query_groups, model.kv_channels
    q = torch.arange(2 * heads * dim).view(groups, heads // groups, 2, dim)
    k = torch.arange(groups * dim).view(groups, 1, dim) + 2 * heads * dim
    rows = torch.cat((q[:, :, 0], q[:, :, 1], k, k + groups * dim), 1).flatten()
    return lambda rank, ranks: rows.chunk(ranks)[rank]


def _interleaved_qkv(heads: int, width: int) -> Rows:
    """Megatron's rows per head [query | key | value] out of Hugging Face's [Q; K; V]."""
    rows = torch.arange(3 * width).view(3, heads, width // heads).transpose(0, 1).flatten()
    return lambda rank, ranks: rows.chunk(ranks)[rank]
