"""A store of its own for each start of the ranks, when torchrun may start them again.

torchrun keeps one key-value store over its restarts (as of torch 2.14). What the dead ranks wrote is still there, so a
new rank can find the address of a dead one and fail to connect. torchrun's restart count does not tell starts apart,
since on several machines each counts for itself. So the ranks agree on a name for this start, under which they put
everything they write.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

import torch.distributed as dist

_POLL_S = 0.02


def rendezvous() -> dict[str, Any]:
    """Arguments of `init_process_group` that make ranks of this start meet; none when torchrun restarts nobody."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return {}
    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    return {"store": store_of_this_start(store, rank, world_size), "rank": rank, "world_size": world_size}


def store_of_this_start(store: dist.Store, rank: int, world_size: int) -> dist.PrefixStore:
    """`store` under a name that only ranks of this start know. Collective over the world.

    Rank 0 chooses the name. Another rank says hello with a number that nobody used before, and gets the name as the
    answer to that number: whatever an earlier start left in the store answers other numbers. Rank 0 answers until
    every rank has confirmed this very name, since the first hello that it sees may be a dead rank's.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        missing = set(range(1, world_size))
        while missing:
            for other in sorted(missing):
                if store.check([f"hello/{other}"]):
                    store.set(f"answer/{store.get(f'hello/{other}').decode()}", name)
                if store.check([f"confirmed/{name}/{other}"]):
                    missing.discard(other)
            time.sleep(_POLL_S)
    else:
        number = uuid.uuid4().hex
        store.set(f"hello/{rank}", number)
        name = store.get(f"answer/{number}").decode()
        store.set(f"confirmed/{name}/{rank}", "")
    return dist.PrefixStore(name, store)
