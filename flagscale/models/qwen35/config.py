"""Megatron-Core configurations of both modules, derived from this project's `ModelConfig` and nothing else."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from flagscale.config.schema import ModelConfig
from flagscale.plan.layout import Grid
from flagscale.platforms import Platform

gelu_tanh = partial(functional.gelu, approximate="tanh")


def language_config(model: ModelConfig, *, grid: Grid, bf16: bool, platform: Platform) -> TransformerConfig:
    """Configuration of the language model on `grid`."""
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size or model.moe_ffn_hidden_size,
        **_experts(model, grid, platform),
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        layernorm_zero_centered_gamma=True,
        qk_layernorm=True,
        attention_output_gate=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=model.full_attention_interval,
        linear_conv_kernel_dim=model.linear_conv_kernel_dim,
        linear_key_head_dim=model.linear_key_head_dim,
        linear_value_head_dim=model.linear_value_head_dim,
        linear_num_key_heads=model.linear_num_key_heads,
        linear_num_value_heads=model.linear_num_value_heads,
        gated_linear_unit=True,
        activation_func=functional.silu,
        # Transformer Engine's SwiGLU and cross entropy are single kernels; Megatron-Core's own lean on torch.compile.
        use_te_activation_func=platform.transformer_engine,
        bias_activation_fusion=platform.is_cuda and not platform.transformer_engine,
        cross_entropy_loss_fusion=platform.is_cuda,
        cross_entropy_fusion_impl="te" if platform.transformer_engine else "native",
        apply_rope_fusion=False,  # the fused kernel does not know a batch with different positions a sample
        mrope_section=list(model.mrope_section),
        mtp_num_layers=model.mtp_num_layers or None,
        mtp_loss_scaling_factor=model.mtp_loss_scaling_factor,
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        # One rank has nothing to split along the sequence, and Megatron-Core warns about it.
        sequence_parallel=model.sequence_parallel and grid.tp > 1,
        add_bias_linear=False,
        init_method_std=model.init_method_std,
        **_common(bf16, platform),
    )


def _experts(model: ModelConfig, grid: Grid, platform: Platform) -> dict[str, Any]:
    """Experts of every layer: the softmax over those chosen, which is transformers' normalised top-k, in fp32."""
    if not model.num_experts:
        return {}
    return {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.moe_router_topk,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
        "moe_router_dtype": "fp32",
        # Of each sample apart: over the tokens of a microbatch the loss would depend on the layout. `BalancedRouter`
        # adds one sample's loss to another's, so the mean over the global batch is taken here.
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff / model.global_batch_size,
        "moe_grouped_gemm": platform.transformer_engine,
        "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": 1,
    }


def vision_config(model: ModelConfig, *, grid: Grid, bf16: bool, platform: Platform) -> TransformerConfig:
    """Configuration of the vision encoder's transformer blocks on `grid`."""
    return TransformerConfig(
        num_layers=model.vision_num_layers,
        hidden_size=model.vision_hidden_size,
        ffn_hidden_size=model.vision_ffn_hidden_size,
        num_attention_heads=model.vision_num_attention_heads,
        kv_channels=model.vision_hidden_size // model.vision_num_attention_heads,
        normalization="LayerNorm",
        layernorm_epsilon=model.vision_norm_epsilon,
        activation_func=gelu_tanh,
        apply_rope_fusion=platform.transformer_engine,
        bias_activation_fusion=False,  # the fused kernels know exact GELU and SwiGLU only
        add_bias_linear=True,
        tensor_model_parallel_size=grid.tp,
        init_method_std=model.init_method_std,
        **_common(bf16, platform),
    )


def _common(bf16: bool, platform: Platform) -> dict[str, Any]:
    dtype = torch.bfloat16 if bf16 else torch.float32
    return {
        "transformer_impl": "transformer_engine" if platform.transformer_engine else "local",
        "bf16": bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # Gradients are sums over tokens; the trainer divides by the tokens of the global batch. A mean over a
        # replica's tokens would weigh replicas equally, whatever they hold.
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # variable_seq_lengths demands it, even of a dense model
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Every value comes from `weights.init_weights` or a checkpoint, so that layouts start equal.
        "perform_initialization": False,
        "use_cpu_initialization": not platform.is_cuda,
        "bias_dropout_fusion": platform.is_cuda,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
