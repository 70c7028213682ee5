"""What every rank of the pool needs, imported once: ranks are forked from the process that has done so."""

from __future__ import annotations

import gc
from types import SimpleNamespace

from flagscale.light import light_imports

with light_imports():
    import torch
    import torch.distributed as dist

    import flagscale.train.loop
    from flagscale.platforms import get_platform

__all__ = ["dist"]

torch.set_num_threads(1)
get_platform("cpu").install()
# A rank trains again and again. What a run freezes and gives back at its end would bring these imports back with it.
flagscale.train.loop.gc = SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)

# A rank collects garbage after every case: not among the million objects that exist by now.
gc.collect()
gc.freeze()
