"""What every rank of the pool needs, imported once: ranks are forked from the process that has done so."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist

from flagscale.platforms import get_platform
from flagscale.platforms.light import light_imports

with light_imports():
    import flagscale.train.loop  # noqa: F401  (for the forks)

__all__ = ["dist"]

torch.set_num_threads(1)
get_platform("cpu").install()

# A rank collects garbage after every case: not among the million objects of these imports.
gc.collect()
gc.freeze()
