"""Moving small host tensors to the device without making the host wait."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`; on a GPU by an asynchronous copy.

    A copy from pageable memory waits for everything queued on the stream before it, so the tensor is pinned first.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)
