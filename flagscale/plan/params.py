"""Parameter counts from the configuration alone, exact, part by part.

The parts are vision (without its merger), merger, language (with embedding and, when untied, output layer) and mtp.
"""

from __future__ import annotations

from flagscale.config.schema import ModelConfig


def parameter_counts(model: ModelConfig) -> dict[str, int]:
    """Parameters of each part; their sum is the whole model, a tied output layer counted once."""
    return {
        "vision": vision_parameters(model),
        "merger": merger_parameters(model),
        "language": language_parameters(model),
        "mtp": mtp_parameters(model),
    }


def patch_values(model: ModelConfig) -> int:
    """Numbers in one patch: 3 channels x frames x side x side."""
    return 3 * model.vision_temporal_patch_size * model.vision_patch_size**2


def vision_parameters(model: ModelConfig) -> int:
    """Patch embedding, position table and blocks of the vision encoder; every linear layer and norm has a bias."""
    h, ffn = model.vision_hidden_size, model.vision_ffn_hidden_size
    attention = (h * 3 * h + 3 * h) + (h * h + h)
    mlp = (h * ffn + ffn) + (ffn * h + h)
    norms = 2 * 2 * h
    patch_embedding = patch_values(model) * h + h
    return (
        patch_embedding + model.vision_num_position_embeddings * h + model.vision_num_layers * (attention + mlp + norms)
    )


def merger_parameters(model: ModelConfig) -> int:
    """LayerNorm of a patch, then two linear layers on the merged patches."""
    merged = model.vision_hidden_size * model.vision_spatial_merge_size**2
    return 2 * model.vision_hidden_size + merged * merged + merged + merged * model.hidden_size + model.hidden_size


def attention_parameters(model: ModelConfig) -> int:
    """Gated attention without biases: query and gate, key, value, output, and the norms of query and key."""
    query = model.num_attention_heads * model.kv_channels
    key = model.num_query_groups * model.kv_channels
    return model.hidden_size * (2 * query + 2 * key) + query * model.hidden_size + 2 * model.kv_channels


def gdn_widths(model: ModelConfig) -> tuple[int, int]:
    """Widths of all key heads and of all value heads of a Gated DeltaNet layer."""
    return (
        model.linear_num_key_heads * model.linear_key_head_dim,
        model.linear_num_value_heads * model.linear_value_head_dim,
    )


def gdn_parameters(model: ModelConfig) -> int:
    """Gated DeltaNet: q, k, v, z, beta, alpha projections, convolution, A_log, dt_bias, output norm and projection."""
    key, value = gdn_widths(model)
    heads = model.linear_num_value_heads
    projections = model.hidden_size * (2 * key + 2 * value + 2 * heads)
    convolution = (2 * key + value) * model.linear_conv_kernel_dim
    return projections + convolution + 2 * heads + model.linear_value_head_dim + value * model.hidden_size


def mlp_parameters(model: ModelConfig) -> int:
    """Gated MLP (gate, up and down); or the routed experts and what every token passes beside them."""
    return 3 * model.hidden_size * model.ffn_hidden_size + expert_parameters(model) + shared_parameters(model)


def expert_parameters(model: ModelConfig) -> int:
    """All routed experts of a layer; 0 in a dense model."""
    return model.num_experts * 3 * model.hidden_size * model.moe_ffn_hidden_size


def shared_parameters(model: ModelConfig) -> int:
    """Router, shared expert and its gate; 0 in a dense model."""
    if not model.num_experts:
        return 0
    return model.hidden_size * (model.num_experts + 3 * model.moe_shared_expert_intermediate_size + 1)


def active_parameters(model: ModelConfig) -> int:
    """Parameters of the language model that a token meets, without MTP."""
    idle = model.num_experts - model.moe_router_topk
    return language_parameters(model) - model.num_layers * idle * 3 * model.hidden_size * model.moe_ffn_hidden_size


def attention_layers(model: ModelConfig) -> int:
    """Decoder layers with full attention; the others are Gated DeltaNet."""
    return model.num_layers // model.full_attention_interval


def language_parameters(model: ModelConfig) -> int:
    """Embedding, decoder layers with their two norms, final norm, and the output layer when it is untied."""
    full = attention_layers(model)
    mixers = full * attention_parameters(model) + (model.num_layers - full) * gdn_parameters(model)
    layers = mixers + model.num_layers * (mlp_parameters(model) + 2 * model.hidden_size)
    tables = 2 if model.untie_embeddings_and_output_weights else 1
    return tables * model.vocab_size * model.hidden_size + layers + model.hidden_size


def mtp_parameters(model: ModelConfig) -> int:
    """Multi-token prediction: norms of both inputs, their projection, an attention layer, a final norm."""
    h = model.hidden_size
    layer = attention_parameters(model) + mlp_parameters(model) + 2 * h
    return model.mtp_num_layers * (2 * h + 2 * h * h + layer + h)
