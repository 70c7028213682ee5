"""The trainer, with a pause before each iteration: a job that lasts, on cores that other tests use meanwhile."""

from __future__ import annotations

import sys
import time

from flagscale.light import light_imports
from flagscale.train.megatron import train_qwen35

PAUSE = 0.25  # s


def pace() -> None:
    """Slows this process's iterations down."""
    with light_imports():
        from flagscale.train.loop import Training

    iterate = Training._iterate

    def paced(self: Training, step: int) -> None:
        time.sleep(PAUSE)
        iterate(self, step)

    Training._iterate = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    pace()
    sys.exit(train_qwen35.main())
