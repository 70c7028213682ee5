"""What the device of a run changes, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

CPU = "cpu"
CUDA = "cuda"


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """A device, its communication library and the kernels that Megatron-Core finds on it.

    Attributes:
        name: `cpu` or `cuda`.
        device: where parameters and activations live; on CUDA this process's own GPU.
        backend: torch.distributed backend, `gloo` or `nccl`.
        transformer_engine: build linears and norms from Transformer Engine.
        delta_rule: what computes Gated DeltaNet, `torch` or `flash-linear-attention`.
        peak_flops: dense bf16 matrix FLOP/s of the device by its vendor, None where unknown.
        description: one line for the log.
        install: prepares the process; call it before a model or an optimizer is built. May be called again.
    """

    name: str
    device: torch.device
    backend: str
    transformer_engine: bool
    delta_rule: str
    peak_flops: float | None
    description: str
    install: Callable[[], None]

    @property
    def is_cuda(self) -> bool:
        """Whether tensors live on a GPU."""
        return self.name == CUDA

    def synchronize(self) -> None:
        """Waits for the device; nothing to wait for on a CPU."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
