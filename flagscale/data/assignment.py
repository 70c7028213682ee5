"""Who encodes which visual item: an assignment that every rank computes alone and identically.

Pure integers. Vision replica (dp coordinate) d of the vision grid encodes the items that `assign` gives it; its tp
ranks share the reading of their files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flagscale.plan.layout import Grid

GOOD_ENOUGH = 1.01  # max/mean of the load at which refining stops


@dataclass(frozen=True, kw_only=True, slots=True)
class VisualItem:
    """One image or one frame group of a video in a macro batch.

    Attributes:
        index: its number in the macro batch, in the order microbatch, replica, slot, placeholder.
        microbatch: number within the macro batch.
        replica: dp coordinate of the language replica that uses it.
        slot: row within the microbatch of that replica.
        start: position of its first placeholder in that row.
        grid_h, grid_w: patches before merging.
        num_tokens: placeholders and embeddings.
        media, frame: number of the medium in the sample; frame group in it, -1 for an image.
        sample: id of the sample.
        row_length: tokens of the row where rows differ in length (packed samples); None: seq_length.
    """

    index: int
    microbatch: int
    replica: int
    slot: int
    start: int
    grid_h: int
    grid_w: int
    num_tokens: int
    media: int
    frame: int
    sample: int = 0
    row_length: int | None = None

    @property
    def num_patches(self) -> int:
        """Patches of the item."""
        return self.grid_h * self.grid_w


def assign(
    items: Sequence[VisualItem],
    costs: Sequence[int],
    vision: Grid,
    language: Grid,
    balance: str,
    ranks_per_node: int,
) -> tuple[tuple[int, ...], ...]:
    """For every vision dp coordinate the indexes of the items it encodes, ascending.

    Args:
        items: of one macro batch, `items[i].index == i`.
        costs: work of each item, any unit; integers, so that every rank gets the same sums.
        vision, language: grids of the two modules.
        balance: where an item may go. `none`: dealt round-robin, in sample order, to the coordinates that share ranks
            with its language replica; `replica`: the same coordinates, evened out; `node`: the coordinates with ranks
            on the nodes of its replica; `world`: all.
        ranks_per_node: ranks of a machine.
    """
    candidates = _candidates(vision, language, balance, ranks_per_node)
    if balance == "none":
        owners = _deal(items, candidates)
    else:
        owners = _longest_first(items, costs, candidates, vision.dp)
        _refine(owners, [candidates[item.replica] for item in items], costs, vision.dp)
    shares: list[list[int]] = [[] for _ in range(vision.dp)]
    for item, owner in zip(items, owners, strict=True):
        shares[owner].append(item.index)
    return tuple(tuple(share) for share in shares)


def _candidates(vision: Grid, language: Grid, balance: str, ranks_per_node: int) -> list[tuple[int, ...]]:
    """For every language replica the vision dp coordinates that may encode its items, ascending.

    A coordinate whose ranks lie in several replicas belongs to all of them.
    """
    everyone = tuple(range(vision.dp))
    if balance == "world":
        return [everyone] * language.dp
    span = ranks_per_node if balance == "node" else 1
    homes = [{rank // span for rank in vision.ranks if vision.coordinate(rank)["dp"] == d} for d in everyone]
    candidates = []
    for replica in range(language.dp):
        own = {rank // span for rank in language.ranks if language.coordinate(rank)["dp"] == replica}
        near = tuple(d for d in everyone if homes[d] & own)
        assert near, f"language replica {replica} shares no rank with the vision grid {vision}"
        candidates.append(near)
    return candidates


def _deal(items: Sequence[VisualItem], candidates: Sequence[tuple[int, ...]]) -> list[int]:
    """Owners by turns within each replica's candidates."""
    dealt = [0] * len(candidates)
    owners = []
    for item in items:
        near = candidates[item.replica]
        owners.append(near[dealt[item.replica] % len(near)])
        dealt[item.replica] += 1
    return owners


def _longest_first(
    items: Sequence[VisualItem], costs: Sequence[int], candidates: Sequence[tuple[int, ...]], num_owners: int
) -> list[int]:
    """Owners by longest processing time: the costliest item left goes to its least loaded candidate (Graham 1969)."""
    loads = [0] * num_owners
    owners = [0] * len(items)
    for i in sorted(range(len(items)), key=lambda i: (-costs[i], i)):
        owner = min(candidates[items[i].replica], key=lambda d: (loads[d], d))
        owners[i] = owner
        loads[owner] += costs[i]
    return owners


def _refine(owners: list[int], allowed: Sequence[tuple[int, ...]], costs: Sequence[int], num_owners: int) -> None:
    """Move or exchange items of the most loaded owner while that lowers the larger of the two loads, in place.

    Measured at four log-normal items an owner, none over a fair share (2193 draws): the worst max/mean falls from 1.066
    to 1.044, the 99th percentile from 1.043 to 1.027.
    """
    loads = [0] * num_owners
    shares: list[set[int]] = [set() for _ in range(num_owners)]
    for i, owner in enumerate(owners):
        loads[owner] += costs[i]
        shares[owner].add(i)
    for _ in range(8 * num_owners):
        high = max(range(num_owners), key=lambda d: (loads[d], -d))
        if loads[high] * num_owners <= GOOD_ENOUGH * sum(loads):
            return
        best = _best_exchange(high, loads, shares, allowed, costs)
        if best is None:
            return
        give, take, low = best
        moves = [(give, high, low)] if take is None else [(give, high, low), (take, low, high)]
        for i, source, target in moves:
            shares[source].remove(i)
            shares[target].add(i)
            loads[source] -= costs[i]
            loads[target] += costs[i]
            owners[i] = target


def _best_exchange(
    high: int,
    loads: Sequence[int],
    shares: Sequence[set[int]],
    allowed: Sequence[tuple[int, ...]],
    costs: Sequence[int],
) -> tuple[int, int | None, int] | None:
    """(item to give, item to take or None, other owner) that lowers the larger load most; None when nothing does."""
    best, best_load = None, loads[high]
    for low in range(len(loads)):
        gap = loads[high] - loads[low]
        if low == high or gap <= 0:
            continue
        takes: list[int | None] = [None, *sorted(i for i in shares[low] if high in allowed[i])]
        for give in sorted(i for i in shares[high] if low in allowed[i]):
            for take in takes:
                moved = costs[give] - (0 if take is None else costs[take])
                larger = max(loads[high] - moved, loads[low] + moved)
                if larger < best_load:
                    best, best_load = (give, take, low), larger
    return best


def share_reads(
    encode: Sequence[Sequence[int]], items: Sequence[VisualItem], vision: Grid
) -> dict[int, tuple[int, ...]]:
    """For every rank of the vision grid the indexes of the items whose files it opens, ascending.

    The items of a vision replica are divided by patches over its tp ranks, so each item is decoded once in the job.
    """
    reads: dict[int, tuple[int, ...]] = {}
    for d, indexes in enumerate(encode):
        loads = [0] * vision.tp
        shares: list[list[int]] = [[] for _ in range(vision.tp)]
        for i in sorted(indexes, key=lambda i: (-items[i].num_patches, i)):
            t = min(range(vision.tp), key=lambda t: (loads[t], t))
            loads[t] += items[i].num_patches
            shares[t].append(i)
        for t, share in enumerate(shares):
            reads[vision.rank(tp=t, dp=d)] = tuple(sorted(share))
    return reads
