"""The device of a run: `get_platform` decides once, everything else receives the answer."""

from __future__ import annotations

import os

import torch

from flagscale.platforms.platform import CPU, CUDA, Platform

__all__ = ["CPU", "CUDA", "Platform", "get_platform"]


def get_platform(name: str = "auto") -> Platform:
    """The platform called `name`; `auto` is CUDA when every process of this machine has a GPU of its own, else CPU.

    Raises:
        flagscale.config.errors.UserError: CUDA is asked for and absent, or a kernel library there gives wrong results.
    """
    if name == "auto":
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
        name = CUDA if torch.cuda.device_count() >= processes else CPU
    if name == CPU:
        from flagscale.platforms.cpu import cpu_platform

        return cpu_platform()
    if name == CUDA:
        from flagscale.platforms.cuda import cuda_platform

        return cuda_platform()
    raise ValueError(f"platform {name!r} is not one of auto, cpu, cuda")
