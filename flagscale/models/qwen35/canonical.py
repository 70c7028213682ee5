"""The model's weights by their Hugging Face names: shapes, and how each is initialised.

This is the canonical form: it does not depend on any parallel layout. `model.visual.*` belongs to the vision encoder,
`model.language_model.*`, `lm_head.*` and `mtp.*` to the language model. Experts have a tensor each, also where files
store those of a layer as one (`hf_files`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flagscale.config.errors import UserError
from flagscale.config.schema import ModelConfig
from flagscale.plan.layout import LANGUAGE, VISION

VISUAL = "model.visual."
TEXT = "model.language_model."
EMBEDDING = TEXT + "embed_tokens.weight"

# How a tensor starts.
NORMAL = "normal"  # mean 0, standard deviation model.init_method_std
ZEROS = "zeros"
ONES = "ones"
TIME_STEP = "time_step"  # inverse softplus of a step drawn log-uniformly from 0.001 to 0.1, Gated DeltaNet's dt_bias
DECAY = "decay"  # log of a uniform number between 0.01 and 16, transformers' start of A_log

CHANNELS = 3
SHOWN = 5  # names in a message


@dataclass(frozen=True, slots=True)
class Canonical:
    """Shape and initialisation of one tensor."""

    shape: tuple[int, ...]
    init: str = NORMAL


def canonical_tensors(model: ModelConfig, module: str | None = None) -> dict[str, Canonical]:
    """Every tensor of the model, or of one module (`VISION`, `LANGUAGE`), by its Hugging Face name."""
    tensors: dict[str, Canonical] = {}
    if module in (None, VISION):
        tensors.update(_vision(model))
    if module in (None, LANGUAGE):
        tensors.update(_language(model))
    return tensors


def canonical_shapes(model: ModelConfig, module: str | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of `canonical_tensors`."""
    return {name: tensor.shape for name, tensor in canonical_tensors(model, module).items()}


def check_names(where: str, found: set[str], expected: set[str]) -> None:
    """Every tensor of the model is there and nothing else.

    Raises:
        UserError: names what is missing and what is unexpected.
    """
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if not missing and not unexpected:
        return
    parts = [
        f"{what} {len(names)} ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
        for what, names in (("lacks", missing), ("has unexpected", unexpected))
        if names
    ]
    remedy = "take the model config that belongs to these weights"
    if missing and all(name.startswith("mtp.") for name in missing):
        remedy = "transformers drops these when it saves; take the released weights, or set model.mtp_num_layers to 0"
    raise UserError(f"{where}: {' and '.join(parts)} of {len(expected)} tensors; {remedy}")


def is_full_attention(model: ModelConfig, layer: int) -> bool:
    """Whether decoder layer `layer` (from 0) is attention rather than Gated DeltaNet."""
    return (layer + 1) % model.full_attention_interval == 0


def _vision(model: ModelConfig) -> Iterator[tuple[str, Canonical]]:
    width, ffn = model.vision_hidden_size, model.vision_ffn_hidden_size
    patch = (CHANNELS, model.vision_temporal_patch_size, model.vision_patch_size, model.vision_patch_size)
    yield VISUAL + "patch_embed.proj.weight", Canonical((width, *patch))
    yield VISUAL + "patch_embed.proj.bias", Canonical((width,), ZEROS)
    yield VISUAL + "pos_embed.weight", Canonical((model.vision_num_position_embeddings, width))
    for n in range(model.vision_num_layers):
        block = f"{VISUAL}blocks.{n}."
        yield from _layer_norm(block + "norm1", width)
        yield from _layer_norm(block + "norm2", width)
        yield from _linear(block + "attn.qkv", 3 * width, width)
        yield from _linear(block + "attn.proj", width, width)
        yield from _linear(block + "mlp.linear_fc1", ffn, width)
        yield from _linear(block + "mlp.linear_fc2", width, ffn)
    merged = width * model.vision_spatial_merge_size**2
    yield from _layer_norm(VISUAL + "merger.norm", width)
    yield from _linear(VISUAL + "merger.linear_fc1", merged, merged)
    yield from _linear(VISUAL + "merger.linear_fc2", model.hidden_size, merged)


def _language(model: ModelConfig) -> Iterator[tuple[str, Canonical]]:
    width = model.hidden_size
    yield EMBEDDING, Canonical((model.vocab_size, width))
    for n in range(model.num_layers):
        layer = f"{TEXT}layers.{n}."
        yield from _attention(layer, model) if is_full_attention(model, n) else _delta_net(layer, model)
        yield from _mlp_and_norms(layer, model)
    yield TEXT + "norm.weight", Canonical((width,), ZEROS)
    if model.untie_embeddings_and_output_weights:
        yield "lm_head.weight", Canonical((model.vocab_size, width))
    if model.mtp_num_layers:
        yield "mtp.fc.weight", Canonical((width, 2 * width))
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            yield f"mtp.{norm}.weight", Canonical((width,), ZEROS)
    for n in range(model.mtp_num_layers):
        yield from _attention(f"mtp.layers.{n}.", model)
        yield from _mlp_and_norms(f"mtp.layers.{n}.", model)


def _attention(layer: str, model: ModelConfig) -> Iterator[tuple[str, Canonical]]:
    dim, width = model.kv_channels, model.hidden_size
    heads, groups = model.num_attention_heads * dim, model.num_query_groups * dim
    yield layer + "self_attn.q_proj.weight", Canonical((2 * heads, width))  # per head [query | gate]
    yield layer + "self_attn.k_proj.weight", Canonical((groups, width))
    yield layer + "self_attn.v_proj.weight", Canonical((groups, width))
    yield layer + "self_attn.o_proj.weight", Canonical((width, heads))
    yield layer + "self_attn.q_norm.weight", Canonical((dim,), ZEROS)
    yield layer + "self_attn.k_norm.weight", Canonical((dim,), ZEROS)


def _delta_net(layer: str, model: ModelConfig) -> Iterator[tuple[str, Canonical]]:
    width, heads = model.hidden_size, model.linear_num_value_heads
    keys, values = model.linear_num_key_heads * model.linear_key_head_dim, heads * model.linear_value_head_dim
    yield layer + "linear_attn.in_proj_qkv.weight", Canonical((2 * keys + values, width))
    yield layer + "linear_attn.in_proj_z.weight", Canonical((values, width))
    yield layer + "linear_attn.in_proj_b.weight", Canonical((heads, width))
    yield layer + "linear_attn.in_proj_a.weight", Canonical((heads, width))
    yield layer + "linear_attn.conv1d.weight", Canonical((2 * keys + values, 1, model.linear_conv_kernel_dim))
    yield layer + "linear_attn.A_log", Canonical((heads,), DECAY)
    yield layer + "linear_attn.dt_bias", Canonical((heads,), TIME_STEP)
    yield layer + "linear_attn.norm.weight", Canonical((model.linear_value_head_dim,), ONES)
    yield layer + "linear_attn.out_proj.weight", Canonical((width, values))


def _mlp_and_norms(layer: str, model: ModelConfig) -> Iterator[tuple[str, Canonical]]:
    width = model.hidden_size
    yield layer + "input_layernorm.weight", Canonical((width,), ZEROS)
    yield layer + "post_attention_layernorm.weight", Canonical((width,), ZEROS)
    if not model.num_experts:
        yield from _gated_mlp(layer + "mlp.", width, model.ffn_hidden_size)
        return
    yield layer + "mlp.gate.weight", Canonical((model.num_experts, width))
    for expert in range(model.num_experts):
        yield from _gated_mlp(f"{layer}mlp.experts.{expert}.", width, model.moe_ffn_hidden_size)
    yield from _gated_mlp(layer + "mlp.shared_expert.", width, model.moe_shared_expert_intermediate_size)
    yield layer + "mlp.shared_expert_gate.weight", Canonical((1, width))


def _gated_mlp(name: str, width: int, ffn: int) -> Iterator[tuple[str, Canonical]]:
    yield name + "gate_proj.weight", Canonical((ffn, width))
    yield name + "up_proj.weight", Canonical((ffn, width))
    yield name + "down_proj.weight", Canonical((width, ffn))


def _linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, Canonical]]:
    yield name + ".weight", Canonical((rows, columns))
    yield name + ".bias", Canonical((rows,), ZEROS)


def _layer_norm(name: str, width: int) -> Iterator[tuple[str, Canonical]]:
    yield name + ".weight", Canonical((width,), ONES)
    yield name + ".bias", Canonical((width,), ZEROS)
