"""The trainer, with a fault on rank 1 in iteration 2: FAULT is memory, killed or nan (from there on)."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

from flagscale.train.megatron import train_qwen35

FAULT, ITERATION = os.environ["FAULT"], 2


def break_rank() -> None:
    """Puts the fault into this process."""
    from flagscale.light import light_imports

    with light_imports():
        from flagscale.train import language
        from flagscale.train.loop import Training

    iterate, forward, loss, now = Training._iterate, language._training_forward, language._loss, [0]

    def counted(self: Training, step: int) -> None:
        now[0] = step + 1
        iterate(self, step)

    def failing(*arguments: Any) -> Any:
        if now[0] == ITERATION and FAULT == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. Of the allocated memory ...")
        if now[0] == ITERATION and FAULT == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*arguments)

    def poisoned(*arguments: Any) -> Any:
        total, count, sums = loss(*arguments)
        return (total * torch.nan, count, sums * torch.nan) if now[0] >= ITERATION else (total, count, sums)

    Training._iterate = counted  # type: ignore[method-assign]
    if FAULT == "nan":
        language._loss = poisoned
    else:
        language._training_forward = failing


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        break_rank()
    sys.exit(train_qwen35.main())
