"""Model FLOPs from the configuration alone.

A matrix product of [m, k] and [k, n] counts 2*m*k*n; norms, activations and other elementwise work count nothing.
Causal attention counts the half of the score matrix that is used. Training counts the backward pass as twice the
forward pass, less what frozen parts save.
"""

from __future__ import annotations

from flagscale.config.schema import ModelConfig
from flagscale.plan.params import attention_layers, gdn_widths, patch_values

GDN_CHUNK = 64
"""Tokens of a chunk in the chunked delta rule; its cost depends on it."""


def vision_item_flops(model: ModelConfig, grid_h: int, grid_w: int) -> float:
    """Forward FLOPs of one visual item (an image or a frame group) of grid_h x grid_w patches, merger included."""
    patches = grid_h * grid_w
    return encoder_flops(model, patches) + merger_flops(model, patches)


def encoder_flops(model: ModelConfig, patches: int) -> float:
    """Forward FLOPs of patch embedding and blocks for one item: linear in patches plus the quadratic attention term."""
    h, ffn = model.vision_hidden_size, model.vision_ffn_hidden_size
    linear = 2 * (4 * h * h + 2 * h * ffn)
    attention = 4 * patches * h
    return float(patches) * (2 * patch_values(model) * h + model.vision_num_layers * (linear + attention))


def merger_flops(model: ModelConfig, patches: int) -> float:
    """Forward FLOPs of the merger for `patches` patches."""
    merge_area = model.vision_spatial_merge_size**2
    merged = model.vision_hidden_size * merge_area
    return float(patches // merge_area) * 2 * (merged * merged + merged * model.hidden_size)


def language_flops(model: ModelConfig, batch: int, seq: int) -> float:
    """Forward FLOPs of decoder and output layer, without MTP, for `batch` sequences of `seq` tokens."""
    full = attention_layers(model)
    layers = full * _attention(model, seq) + (model.num_layers - full) * _gdn(model) + model.num_layers * _mlp(model)
    return float(batch) * seq * (layers + _head(model))


def mtp_flops(model: ModelConfig, batch: int, seq: int) -> float:
    """Forward FLOPs of the multi-token-prediction layer and its pass through the output layer."""
    h = model.hidden_size
    token = 2 * 2 * h * h + _attention(model, seq) + _mlp(model) + _head(model)
    return float(batch) * seq * model.mtp_num_layers * token


def training_factors(model: ModelConfig) -> dict[str, int]:
    """Forward plus backward as a multiple of the forward pass, by part.

    3 for a trained part; 2 for a frozen one that gradients pass through; 1 where no gradient goes at all.
    """
    visual_trained = not (model.freeze_vision and model.freeze_merger)
    return {
        "vision": 1 if model.freeze_vision else 3,
        "merger": 3 if not model.freeze_merger else 2 if visual_trained else 1,
        "language": 3 if not model.freeze_language else 2,
        "mtp": 3 if not model.freeze_language else 2,
    }


def vision_item_training_flops(model: ModelConfig, grid_h: int, grid_w: int) -> float:
    """FLOPs of forward and backward of one visual item."""
    factors, patches = training_factors(model), grid_h * grid_w
    return factors["vision"] * encoder_flops(model, patches) + factors["merger"] * merger_flops(model, patches)


def language_training_flops(model: ModelConfig, batch: int, seq: int) -> float:
    """FLOPs of forward and backward of decoder, output layer and MTP for `batch` sequences of `seq` tokens."""
    factors = training_factors(model)
    return factors["language"] * language_flops(model, batch, seq) + factors["mtp"] * mtp_flops(model, batch, seq)


def utilisation(flops: float, *, seconds: float, gpus: int, peak_flops: float) -> float:
    """Model FLOPs utilisation (MFU): the share of what `gpus` could do in `seconds` at `peak_flops` FLOP/s each."""
    return flops / (seconds * gpus * peak_flops)


def _attention(model: ModelConfig, seq: int) -> float:
    query, key = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    linear = 2 * model.hidden_size * (2 * query + 2 * key + query)
    return linear + 4 * query * seq / 2


def _gdn(model: ModelConfig) -> float:
    """A token in the chunked delta rule: 5 products inside a chunk (3 over keys, 2 over values), 3 with the state."""
    key, value = gdn_widths(model)
    heads, d_key, d_value = model.linear_num_value_heads, model.linear_key_head_dim, model.linear_value_head_dim
    linear = 2 * model.hidden_size * (2 * key + 2 * value + 2 * heads + value)
    convolution = 2 * model.linear_conv_kernel_dim * (2 * key + value)
    rule = heads * (2 * GDN_CHUNK * (3 * d_key + 2 * d_value) + 6 * d_key * d_value)
    return linear + convolution + rule


def _mlp(model: ModelConfig) -> float:
    """The dense MLP, or router, shared expert with its gate and the chosen experts."""
    if not model.num_experts:
        return 6 * model.hidden_size * model.ffn_hidden_size
    widths = model.moe_shared_expert_intermediate_size + model.moe_router_topk * model.moe_ffn_hidden_size
    return 2 * model.hidden_size * (model.num_experts + 1) + 6 * model.hidden_size * widths


def _head(model: ModelConfig) -> float:
    return 2 * model.hidden_size * model.vocab_size
