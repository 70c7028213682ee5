"""The device of a run: `get_platform` decides once, everything else receives the answer."""

from __future__ import annotations

import torch

from flagscale.platforms.platform import CPU, CUDA, Platform

__all__ = ["CPU", "CUDA", "Platform", "get_platform"]


def get_platform(name: str = "auto") -> Platform:
    """The platform called `name`; `auto` is CUDA when this process sees a GPU, else CPU.

    Raises:
        flagscale.config.errors.UserError: CUDA is asked for and absent, or a kernel library there gives wrong results.
    """
    if name == "auto":
        name = CUDA if torch.cuda.is_available() else CPU
    if name == CPU:
        from flagscale.platforms.cpu import cpu_platform

        return cpu_platform()
    if name == CUDA:
        from flagscale.platforms.cuda import cuda_platform

        return cuda_platform()
    raise ValueError(f"platform {name!r} is not one of auto, cpu, cuda")
