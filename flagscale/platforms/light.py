"""Megatron-Core without what only GPU runs use: 3.5 s of CPU time instead of 6.1 s for every rank that starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def light_imports() -> Iterator[None]:
    """While modules are imported on a machine without GPUs, `torch.compile` leaves functions as they are.

    Megatron-Core decorates small functions with it, which loads Dynamo and Inductor; on a CPU they run eagerly anyway
    (`platforms/cpu.py`). It also imports wandb when that is installed; the reporter does so itself on rank 0.
    """
    if torch.cuda.is_available():
        yield
        return
    compile_, wandb = torch.compile, sys.modules.get("wandb")
    torch.compile = _unchanged
    sys.modules["wandb"] = None  # type: ignore[assignment]  # an import raises ImportError
    try:
        yield
    finally:
        torch.compile = compile_
        del sys.modules["wandb"]
        if wandb is not None:
            sys.modules["wandb"] = wandb


def _unchanged(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """`torch.compile` as decorator, with and without options, that compiles nothing."""
    return function if function is not None else lambda decorated: decorated
