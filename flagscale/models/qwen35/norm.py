"""Normalisation layers of the language model and the vision encoder."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional


class RMSNorm(torch.nn.Module):
    """y = x / rms(x) * (1 + w), in fp32; Qwen3.5 stores w around zero.

    Megatron-Core's WrappedTorchNorm asserts zero-centred weights and sequence parallelism off, and the rest is
    Transformer Engine only. The weight carries `sequence_parallel`, by which Megatron-Core's gradient finalisation
    knows that each tensor parallel rank saw other tokens and sums the gradients.
    """

    offset = 1.0

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.offset, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension; same shape and dtype."""
        x_float = x.float()
        scale = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + self.eps)
        return (x_float * scale * (self.weight.float() + self.offset)).to(x.dtype)


class PlainRMSNorm(RMSNorm):
    """y = x / rms(x) * w: the norm on the Gated DeltaNet output, the one that Qwen3.5 does not centre.

    Megatron-Core's out_norm follows the model-wide zero-centred switch. Storing w - 1 there would be right but not
    invertible to the bit, so that a checkpoint would change on its way through.
    """

    offset = 0.0


class LayerNorm(torch.nn.LayerNorm):
    """LayerNorm with bias, built the way Megatron-Core builds norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension; same shape and dtype."""
        return functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
