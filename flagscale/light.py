"""Imports of a rank in less than half of their CPU time: nothing that only GPU runs use, and no garbage collection.

To be imported before torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_HIDDEN = ("wandb", "torch.utils.tensorboard")
"""Megatron-Core imports these when they are installed; the reporter does so itself on rank 0."""


@contextmanager
def light_imports() -> Iterator[None]:
    """For the imports of a process that will train.

    No garbage is looked for: what is imported stays, and is left out when it is looked for later. On a machine without
    GPUs `torch.compile` leaves functions as they are: Megatron-Core decorates small functions with it, which loads
    Dynamo and Inductor, and on a CPU they run eagerly anyway (`platforms/cpu.py`). What Megatron-Core merely would like
    to have (`_HIDDEN`) seems not to be installed there.
    """
    gc.disable()
    try:
        with _without_compiler():
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _without_compiler() -> Iterator[None]:
    import torch

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
