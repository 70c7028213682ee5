"""Megatron-Core without what only GPU runs use: half of the CPU time of every rank that starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_HIDDEN = ("wandb", "torch.utils.tensorboard")
"""Megatron-Core imports these when they are installed; the reporter does so itself on rank 0."""


@contextmanager
def light_imports() -> Iterator[None]:
    """While modules are imported on a machine without GPUs, `torch.compile` leaves functions as they are.

    Megatron-Core decorates small functions with it, which loads Dynamo and Inductor; on a CPU they run eagerly anyway
    (`platforms/cpu.py`). What it merely would like to have (`_HIDDEN`) seems not to be installed.
    """
    if torch.cuda.is_available():
        yield
        return
    compile_, loaded = torch.compile, {name: sys.modules.get(name) for name in _HIDDEN}
    torch.compile = _unchanged
    sys.modules.update(dict.fromkeys(_HIDDEN))  # type: ignore[arg-type]  # an import of None raises ImportError
    try:
        yield
    finally:
        torch.compile = compile_
        for name, module in loaded.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _unchanged(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """`torch.compile` as decorator, with and without options, that compiles nothing."""
    return function if function is not None else lambda decorated: decorated
