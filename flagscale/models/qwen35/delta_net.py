"""Gated DeltaNet: Megatron-Core's layer, with padding on the left, packed sequences and fp32 decay."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.jit import jit_fuser
from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet as MegatronGatedDeltaNet
from torch import Tensor
from torch.nn import functional

from flagscale.models.qwen35.attention import PackedSequences


class GatedDeltaNet(MegatronGatedDeltaNet):
    """Takes the mask and the packing of `CoreAttention`, so that both kinds of layers are called alike."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Mixes tokens.

        Args:
            hidden_states: [S, B, hidden], or the sequence parallel shard of it; packed: B = 1.
            attention_mask: [B, S] bool, True where a token is real. Padding must be zero before the projections, or
                the convolution carries it into the first real tokens of a sample padded on the left.
            packed_seq_params: borders of packed sequences; neither convolution nor state crosses them.

        Returns:
            Output of hidden_states' shape, and the bias of the output projection (None).
        """
        if attention_mask is not None:
            real_SB1 = attention_mask.transpose(0, 1).unsqueeze(-1)
            if self.sp_size > 1:
                real_SB1 = real_SB1.chunk(self.sp_size)[self.tp_group.rank()]
            hidden_states = hidden_states * real_SB1.to(hidden_states.dtype)
        if packed_seq_params is not None:
            packed_seq_params = dataclasses.replace(packed_seq_params, qkv_format="thd")
        return super().forward(hidden_states, attention_mask=None, packed_seq_params=packed_seq_params, **kwargs)

    def _resolve_cu_seqlens(
        self, cu_seqlens_padded: Tensor | None, cu_seqlens_actual: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        # Upstream reads the last border back from the device in every layer to check it against the tokens.
        return cu_seqlens_actual

    def _apply_gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """norm(x) * silu(gate) by head, [B, S, H, V]; on a GPU in one kernel each way."""
        fused = _fused_gated_norm() if x.is_cuda else None
        if fused is None:
            return super()._apply_gated_norm(x, gate)
        width = x.shape[-1]
        return fused(x.reshape(-1, width), gate.reshape(-1, width), self.out_norm.weight, None, eps=self.out_norm.eps)

    @jit_fuser
    def _compute_g_and_beta(
        self, A_log_local_cp: Tensor, dt_bias_local_cp: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        # Upstream takes exp(A_log) in the parameters' dtype; in bfloat16 that is off by up to 0.4 % in every decay.
        # transformers computes it in fp32.
        g = -A_log_local_cp.float().exp() * functional.softplus(alpha.float() + dt_bias_local_cp.float())
        return g, torch.sigmoid(beta)


@functools.cache
def _fused_gated_norm() -> Callable[..., Tensor] | None:
    """flash-linear-attention's RMSNorm with a swish gate, where it is installed."""
    try:
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
    except ImportError:
        return None
    return rms_norm_gated
