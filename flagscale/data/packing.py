"""How the samples of a global batch become the rows of its microbatches: pure integers, equal on every rank.

- `none`: a sample a row, padded to seq_length; `micro_batch_size` rows a microbatch.
- `in_batch`: the `micro_batch_size` samples of a microbatch one after the other in one row [1, T].
- `length_budget`: all samples of the global batch are put into rows of at most seq_length tokens; the
  `micro_batch_size` rows of a microbatch lie one after the other in one row [1, T]. How many microbatches that takes
  depends on the lengths.

With `language_balance` the replicas of a macro batch share its samples (or rows) by cost instead of by order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

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
    data, size, replicas = plan.config.data, plan.batch.micro_batch_size, plan.language.dp
    if data.packing == LENGTH_BUDGET:
        bins = fill_bins(batch, length, plan.config.model.seq_length)
        num_microbatches = max(1, -(-len(bins) // (size * replicas)))
        sizes = macro_batches(num_microbatches, plan.batch.vit_batch_factor)
    else:
        bins, sizes = [(sample,) for sample in batch], plan.batch.macro_batches
    found, first = [], 0
    for count in sizes:
        own = bins[first : first + count * size * replicas]
        first += len(own)
        if data.language_balance and data.packing != NONE:
            found.append(_balanced(own, count, replicas, size, lambda one: sum(map(cost, one))))
        else:
            found.append(_in_order(own, count, replicas, size))
    assert first == len(bins), f"{len(bins)} bins do not fit into macro batches of {sizes} microbatches"
    return found


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


def _in_order(bins: Sequence[Bin], count: int, replicas: int, size: int) -> Arrangement:
    """Bins as they come: position p goes to microbatch p // (replicas * size), then replica, then slot."""
    return tuple(
        tuple(tuple(bins[(m * replicas + d) * size : (m * replicas + d + 1) * size]) for d in range(replicas))
        for m in range(count)
    )


def _balanced(
    bins: Sequence[Bin], count: int, replicas: int, size: int, cost: Callable[[Bin], int]
) -> Arrangement:
    """Bins spread over the replicas by cost, then those of a replica over its microbatches."""
    shares = spread([cost(one) for one in bins], replicas, count * size)
    chosen: list[list[tuple[Bin, ...]]] = []
    for share in shares:
        parts = spread([cost(bins[i]) for i in share], count, size)
        chosen.append([tuple(bins[share[i]] for i in part) for part in parts])
    return tuple(tuple(chosen[d][m] for d in range(replicas)) for m in range(count))


def spread(costs: Sequence[int], num_groups: int, room: int) -> list[list[int]]:
    """Indexes in groups of at most `room` members with costs as even as found: costliest first to the cheapest group
    with room, then exchanges of single members between the costliest group and another while that helps."""
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads = [0] * num_groups
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        group = min((g for g in range(num_groups) if len(groups[g]) < room), key=lambda g: (loads[g], g))
        groups[group].append(i)
        loads[group] += costs[i]
    for _ in range(8 * num_groups):
        high = max(range(num_groups), key=lambda g: (loads[g], -g))
        best, best_load = None, loads[high]
        for low in range(num_groups):
            for give in groups[high]:
                for take in groups[low] if low != high else ():
                    larger = max(loads[high] - costs[give] + costs[take], loads[low] + costs[give] - costs[take])
                    if larger < best_load:
                        best, best_load = (give, take, low), larger
        if best is None:
            break
        give, take, low = best
        groups[high][groups[high].index(give)], groups[low][groups[low].index(take)] = take, give
        loads[high] += costs[take] - costs[give]
        loads[low] += costs[give] - costs[take]
    return [sorted(group) for group in groups]
