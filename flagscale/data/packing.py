"""How the samples of a global batch become the rows of its microbatches: pure integers, equal on every rank.

- `none`: a sample a row, padded to seq_length; `micro_batch_size` rows a microbatch.
- `in_batch`: the `micro_batch_size` samples of a microbatch one after the other in one row [1, T].
- `length_budget`: all samples of the global batch are put into rows of at most seq_length tokens; the
  `micro_batch_size` rows of a microbatch lie one after the other in one row [1, T]. How many microbatches that takes
  depends on the lengths.

With `language_balance` the replicas of a macro batch share its samples (rows, with `length_budget`) by cost instead of
by order; with `in_batch` a microbatch then has as many samples as that takes, within the tokens it may have anyway.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from flagscale.plan.batch import macro_batches
from flagscale.plan.plan import ExperimentPlan

NONE, IN_BATCH, LENGTH_BUDGET = "none", "in_batch", "length_budget"
Bin = tuple[int, ...]
"""Samples that share a row, by id."""


Arrangement = tuple[tuple[tuple[Bin, ...], ...], ...]
"""[microbatch][language replica] the bins of a microbatch of a macro batch. With packing they lie in one row; without
it every bin is a sample."""


def arrange(
    batch: Sequence[int], plan: ExperimentPlan, length: Callable[[int], int], cost: Callable[[int], int]
) -> list[Arrangement]:
    """The macro batches of a global batch.

    Args:
        batch: sample ids, empty slots left out when the batch is packed.
        length: tokens of a sample.
        cost: work of the language model on a sample, a whole number.
    """
    data, seq_length = plan.config.data, plan.config.model.seq_length
    size, replicas = plan.batch.micro_batch_size, plan.language.dp
    bins = [(sample,) for sample in batch]
    if data.packing == LENGTH_BUDGET:
        bins = fill_bins(batch, length, seq_length)
    sizes = _sizes(len(bins), plan)
    costs, room = bin_costs(data.packing, length, cost, seq_length), size * seq_length
    found, first = [], 0
    for count in sizes:
        own = bins[first : first + count * size * replicas]
        first += len(own)
        even = _balanced(own, (count, replicas), room, costs) if data.language_balance and costs is not None else None
        found.append(even or _in_order(own, count, replicas, size))
    assert first == len(bins), f"{len(bins)} bins do not fit into macro batches of {sizes} microbatches"
    return found


def num_macro_batches(batch: Sequence[int], plan: ExperimentPlan, length: Callable[[int], int]) -> int:
    """How many macro batches `arrange` makes of a global batch; arguments as there."""
    filled = plan.config.data.packing == LENGTH_BUDGET
    num_bins = len(fill_bins(batch, length, plan.config.model.seq_length)) if filled else len(batch)
    return len(_sizes(num_bins, plan))


def _sizes(num_bins: int, plan: ExperimentPlan) -> tuple[int, ...]:
    """Microbatches of every macro batch."""
    if plan.config.data.packing != LENGTH_BUDGET:
        return plan.batch.macro_batches
    num_microbatches = max(1, -(-num_bins // (plan.batch.micro_batch_size * plan.language.dp)))
    return macro_batches(num_microbatches, plan.batch.vit_batch_factor)


def fill_bins(batch: Sequence[int], length: Callable[[int], int], capacity: int) -> list[Bin]:
    """Bins of at most `capacity` tokens, by best fit of the samples in descending length; ties by position.

    Best-fit decreasing needs at most 11/9 of the optimal number of bins (Johnson 1974), and far fewer where short
    samples fill the gaps.
    """
    order = sorted(range(len(batch)), key=lambda i: (-length(batch[i]), i))
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for i in order:
        tokens = length(batch[i])
        assert tokens <= capacity, f"sample {batch[i]} has {tokens} tokens, more than {capacity}"
        place = bisect_left(room, (tokens, -1))
        if place == len(room):
            bins.append([i])
            insort(room, (capacity - tokens, len(bins) - 1))
            continue
        left, number = room.pop(place)
        bins[number].append(i)
        insort(room, (left - tokens, number))
    return [tuple(batch[i] for i in sorted(members)) for members in bins]


@dataclass(frozen=True, slots=True)
class BinCosts:
    """Work of a bin, and the room it takes in a microbatch, in tokens."""

    cost: Callable[[Bin], int]
    size: Callable[[Bin], int]


def bin_costs(
    packing: str, length: Callable[[int], int], cost: Callable[[int], int], seq_length: int
) -> BinCosts | None:
    """What bins cost; None where every row is padded to the same length."""
    if packing == NONE:
        return None
    whole = packing == LENGTH_BUDGET  # a row takes its full length, however much of it is filled
    return BinCosts(lambda one: sum(map(cost, one)), lambda one: seq_length if whole else sum(map(length, one)))


def _in_order(bins: Sequence[Bin], count: int, replicas: int, size: int) -> Arrangement:
    """Bins as they come: position p goes to microbatch p // (replicas * size), then replica, then slot."""
    return tuple(
        tuple(tuple(bins[(m * replicas + d) * size : (m * replicas + d + 1) * size]) for d in range(replicas))
        for m in range(count)
    )


def _balanced(bins: Sequence[Bin], grid: tuple[int, int], room: int, costs: BinCosts) -> Arrangement | None:
    """Bins spread over the replicas by cost, then those of a replica over its microbatches.

    Args:
        grid: (microbatches, replicas).
        room: tokens of a microbatch's row at most.

    Returns:
        None when the bins are so full that no such arrangement was found.
    """
    count, replicas = grid
    values, sizes = [costs.cost(one) for one in bins], [costs.size(one) for one in bins]
    shares = spread(values, sizes, replicas, count * room)
    chosen: list[list[tuple[Bin, ...]]] = []
    for share in shares or ():
        parts = spread([values[i] for i in share], [sizes[i] for i in share], count, room)
        if parts is None:
            return None
        chosen.append([tuple(bins[share[i]] for i in part) for part in parts])
    if shares is None:
        return None
    return tuple(tuple(chosen[d][m] for d in range(replicas)) for m in range(count))


def spread(costs: Sequence[int], sizes: Sequence[int], num_groups: int, room: int) -> list[list[int]] | None:
    """Indexes in groups of at most `room` size each, with costs as even as found.

    Costliest first to the cheapest group with room; then single members of the costliest group are moved, or exchanged
    with one of another group, while that lowers the larger of the two costs. None when a member finds no room.
    """
    groups: list[set[int]] = [set() for _ in range(num_groups)]
    loads, left = [0] * num_groups, [room] * num_groups

    def place(i: int, group: int, sign: int = 1) -> None:
        (groups[group].add if sign > 0 else groups[group].remove)(i)
        loads[group] += sign * costs[i]
        left[group] -= sign * sizes[i]

    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        fitting = [g for g in range(num_groups) if sizes[i] <= left[g]]
        if not fitting:
            return None
        place(i, min(fitting, key=lambda g: (loads[g], g)))
    for _ in range(8 * num_groups):
        high = max(range(num_groups), key=lambda g: (loads[g], -g))
        best, best_load = None, loads[high]
        for low in range(num_groups):
            takes = [None, *sorted(groups[low])] if low != high else []
            for give, take in product(sorted(groups[high]), takes):
                cost, size = (0, 0) if take is None else (costs[take], sizes[take])
                larger = max(loads[high] - costs[give] + cost, loads[low] + costs[give] - cost)
                if larger < best_load and -left[high] <= sizes[give] - size <= left[low]:
                    best, best_load = (give, take, low), larger
        if best is None:
            break
        give, take, low = best
        for i, source, target in ((give, high, low), (take, low, high)):
            if i is not None:
                place(i, source, -1)
                place(i, target)
    return [sorted(group) for group in groups]
