"""Layer specifications: which class builds which part of a layer, on every platform.

Parameter names are the same with and without Transformer Engine: norms stay modules of their own instead of being
fused into the linear after them, so that checkpoints and the weight mapping do not depend on the platform.

A mixture-of-experts model differs in `_language_mlp` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from flagscale.models.qwen35.attention import CoreAttention, GatedSelfAttention
from flagscale.models.qwen35.delta_net import GatedDeltaNet
from flagscale.models.qwen35.experts import BalancedRouter
from flagscale.models.qwen35.norm import LayerNorm, PlainRMSNorm, RMSNorm


@dataclass(frozen=True, slots=True)
class Parts:
    """Classes of the linears, norms and experts of a platform."""

    column: Any
    row: Any
    rms_norm: Any
    layer_norm: Any
    swiglu: Any
    experts: Any


def parts(transformer_engine: bool) -> Parts:
    """Transformer Engine's classes, or Megatron-Core's linears with this project's norms."""
    if not transformer_engine:
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = partial(SequentialMLP, submodules=linears)
        return Parts(ColumnParallelLinear, RowParallelLinear, RMSNorm, LayerNorm, None, experts)
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    experts = TESpecProvider().grouped_mlp_modules(moe_use_grouped_gemm=True)
    return Parts(te.TEColumnParallelLinear, te.TERowParallelLinear, te.TENorm, te.TENorm, te.TEActivationOp, experts)


class NextTokenLayer(MultiTokenPredictionLayer):
    """A multi-token-prediction layer that is handed the next tokens' embeddings.

    Upstream rolls the ids and embeds them again. A next token inside an image then has the embedding of the
    placeholder instead of the image's, and with sequence parallelism and unscattered embeddings the shapes differ.
    """

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Tensor,
        hidden_states: Tensor,
        packed_seq_params: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        return input_ids, position_ids, padding_mask, embedding, hidden_states


def language_block(config: TransformerConfig, pp_rank: int) -> TransformerBlockSubmodules:
    """The decoder layers of one pipeline stage: every `linear_attention_freq`-th layer is attention, the others GDN."""
    use = parts(config.transformer_impl == "transformer_engine")
    first = get_transformer_layer_offset(config, None, pp_rank)
    numbers = range(first, first + get_num_layers_to_build(config, None, pp_rank))
    full = [(number + 1) % config.linear_attention_freq == 0 for number in numbers]
    layers = [
        _language_layer(use, config, _gated_attention(use) if attention else _delta_net(use)) for attention in full
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=use.rms_norm)


def mtp_block(config: TransformerConfig) -> ModuleSpec:
    """The multi-token-prediction block: a projection of [embedding, hidden] and one standard attention layer."""
    use = parts(config.transformer_impl == "transformer_engine")
    layer = ModuleSpec(
        module=NextTokenLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=use.rms_norm,
            hnorm=use.rms_norm,
            layer_norm=use.rms_norm,
            eh_proj=use.column,
            mtp_model_layer=_language_layer(use, config, _gated_attention(use)),
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers),
    )


def vision_block(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The blocks of the vision encoder; attention inside each item, no final norm."""
    use = parts(config.transformer_impl == "transformer_engine")
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.no_mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=use.column, core_attention=CoreAttention, linear_proj=_adding_bias(use.row)
        ),
    )
    mlp = MLPSubmodules(linear_fc1=_adding_bias(use.column), linear_fc2=_adding_bias(use.row))
    layer = _layer(attention, use.layer_norm, partial(MLP.as_mlp_submodule, submodules=mlp))
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers)


def _language_layer(use: Parts, config: TransformerConfig, attention: ModuleSpec) -> ModuleSpec:
    return _layer(attention, use.rms_norm, _language_mlp(use, config))


def _language_mlp(use: Parts, config: TransformerConfig) -> Any:
    """The dense MLP; or routed experts, and beside them a shared one behind a sigmoid gate."""
    if not config.num_moe_experts:
        return _mlp(use)
    shared = MLPSubmodules(linear_fc1=use.column, linear_fc2=use.row, activation_func=use.swiglu)
    submodules = MoESubmodules(
        router=BalancedRouter, experts=use.experts, shared_experts=partial(SharedExpertMLP, submodules=shared)
    )
    return partial(MoELayer, submodules=submodules)


def _layer(attention: ModuleSpec, norm: Any, mlp: Any) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _adding_bias(linear: Any) -> Any:
    """The linear, adding its bias itself: in the matrix product, where there is no sum over ranks in between.

    Megatron-Core leaves the bias to kernels that it fuses with what follows. Those know exact GELU and SwiGLU only, or
    want torch.compile, and without them a bias is a pass over the activations.
    """

    def build(*args: Any, skip_bias_add: bool, tp_group: ProcessGroup, **kwargs: Any) -> Any:
        built = linear(*args, skip_bias_add=False, tp_group=tp_group, **kwargs)
        if tp_group.size() == 1 and hasattr(built, "gemm_bias_unfused_add"):
            built.gemm_bias_unfused_add = False  # Transformer Engine sets it for row parallel linears of any group
        return built

    return build


def _mlp(use: Parts) -> Any:
    submodules = MLPSubmodules(linear_fc1=use.column, linear_fc2=use.row, activation_func=use.swiglu)
    return partial(MLP.as_mlp_submodule, submodules=submodules)


def _gated_attention(use: Parts) -> ModuleSpec:
    return ModuleSpec(
        module=GatedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=use.column,
            core_attention=CoreAttention,
            linear_proj=use.row,
            q_layernorm=use.rms_norm,
            k_layernorm=use.rms_norm,
        ),
    )


def _delta_net(use: Parts) -> ModuleSpec:
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=use.column, out_norm=PlainRMSNorm, out_proj=use.row),
    )
