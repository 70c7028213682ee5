"""Gated DeltaNet: Megatron-Core's parameters, with padding on the left, packed sequences, fp32 decay and fewer copies.

Shapes: S tokens of a row, S_local those of this rank (S / TP with sequence parallelism), B rows, X projected channels,
K key heads of this rank, H value heads of this rank, D key or value channels of a head, W taps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import gdn
from torch import Tensor

from flagscale.models.qwen35.attention import PackedSequences
from flagscale.platforms.torch_kernels import RAW_INPUTS


class GatedDeltaNet(gdn.GatedDeltaNet):
    """Takes the mask and the packing of `CoreAttention`, so that both kinds of layers are called alike.

    The forward pass is this project's. Upstream's (0.19.2) takes exp(A_log) in the parameters' dtype, which in bfloat16
    is off by up to 0.4 % in every decay, reads borders of packed sequences back from the device in every layer, and
    copies: it repeats query and key heads, which flash-linear-attention's kernels share among value heads by
    themselves, and splits and transposes in steps whose gradients are joined step by step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.cp_size == 1, "context parallelism is not part of this layer"
        assert not self.conv_bias, "the convolution has no bias"
        assert not self.recompute_norm_out, "what is recomputed is a whole layer"
        assert not self.config.deterministic_mode, "Megatron-Core's deterministic rule takes prepared inputs"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Mixes tokens.

        Args:
            hidden_states: [S_local, B, hidden]; packed: B = 1.
            attention_mask: [B, S] bool, True where a token is real. Padding must be zero before the projections, or
                the convolution carries it into the first real tokens of a sample padded on the left.
            packed_seq_params: borders of packed sequences; neither convolution nor state crosses them.

        Returns:
            Output of hidden_states' shape, and the bias of the output projection (None).
        """
        if attention_mask is not None:
            hidden_states = hidden_states * self._real(attention_mask).to(hidden_states.dtype)
        borders = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
        projected_SBX, _ = self.in_proj(hidden_states)
        *mixed, gate, beta_BSH, alpha_BSH = BatchFirstParts.apply(projected_SBX, self.in_proj_split_sections)
        query, key, value = self._convolve(mixed, borders)
        out_BSHD, _ = self.gated_delta_rule(
            query.unflatten(-1, (-1, self.key_head_dim)),
            key.unflatten(-1, (-1, self.key_head_dim)),
            value.unflatten(-1, (-1, self.value_head_dim)),
            alpha_BSH,
            beta_BSH,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            cu_seqlens=borders,
            **RAW_INPUTS,
        )
        normed = self._apply_gated_norm(out_BSHD, gate.unflatten(-1, (-1, self.value_head_dim)))
        return self.out_proj(normed.view(*gate.shape).transpose(0, 1).contiguous())

    def _real(self, attention_mask: Tensor) -> Tensor:
        """[S_local, B, 1] of this rank's tokens."""
        real_SB1 = attention_mask.transpose(0, 1).unsqueeze(-1)
        return real_SB1.chunk(self.sp_size)[self.tp_group.rank()] if self.sp_size > 1 else real_SB1

    def _convolve(self, parts: list[Tensor], borders: Tensor | None) -> list[Tensor]:
        """Query, key and value, each convolved by itself, which leaves each contiguous for the kernels that follow."""
        weights_XW = self.conv1d.weight.squeeze(1).split([part.shape[-1] for part in parts])
        return [
            gdn.causal_conv1d(x=part, weight=weight_XW, activation=self.activation, cu_seqlens=borders)[0]
            for part, weight_XW in zip(parts, weights_XW, strict=True)
        ]

    def _apply_gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """norm(x) * silu(gate) by head, [B, S, H, D]; on a GPU in one kernel each way."""
        fused = _fused_gated_norm() if x.is_cuda else None
        if fused is None:
            return super()._apply_gated_norm(x, gate)
        width = x.shape[-1]
        return fused(x.reshape(-1, width), gate.reshape(-1, width), self.out_norm.weight, None, eps=self.out_norm.eps)


class BatchFirstParts(torch.autograd.Function):
    """[S, B, X] -> views [B, S, X_i] of its parts along X.

    The gradients are written where they belong in one pass. Those of a split and a transposition would be joined in the
    order of the parts, and then copied into the order of the whole.
    """

    @staticmethod
    def forward(ctx: Any, whole_SBX: Tensor, sections: tuple[int, ...]) -> tuple[Tensor, ...]:
        """`sections`: widths of the parts."""
        ctx.sections = sections
        return whole_SBX.transpose(0, 1).split(sections, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Gradients of every part, [B, S, X_i]."""
        batch, tokens, _ = grads[0].shape
        whole_SBX = grads[0].new_empty(tokens, batch, sum(ctx.sections))
        for place, grad in zip(whole_SBX.transpose(0, 1).split(ctx.sections, dim=-1), grads, strict=True):
            place.copy_(grad)
        return whole_SBX, None


@functools.cache
def _fused_gated_norm() -> Callable[..., Tensor] | None:
    """flash-linear-attention's RMSNorm with a swish gate, where it is installed."""
    try:
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
    except ImportError:
        return None
    return rms_norm_gated
