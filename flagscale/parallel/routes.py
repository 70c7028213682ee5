"""Which embedding rows travel between which ranks: integers only, equal on every rank.

A vision replica v encodes the items `encode[v]` and holds their rows, in that order, on each of its TP ranks. Rows are
needed on ranks of the language grid: the first pipeline stage overlays them on its text embedding, and the last stage
does so for the multi-token-prediction (MTP) layer, at the position before. With sequence parallelism a TP rank needs
only rows of its sequence shard (and the one row after it, for MTP).

Forward, a rank gets every row it needs once, from itself where it encoded the row. Backward is the adjoint: every
contribution to a row's gradient goes once to each TP rank of the vision replica that made it. Without sequence
parallelism the TP ranks of a language replica hold equal gradients, so a maker that is one of them takes its own, and
to any other maker one of them sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flagscale.data.assignment import VisualItem
from flagscale.plan.layout import Grid


@dataclass(frozen=True, kw_only=True, slots=True)
class Consumer:
    """What the language model does with visual rows."""

    seq_length: int
    sequence_parallel: bool
    mtp: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """`num_rows` rows of one item, from `first_row` on, that go from one rank to another."""

    item: int
    first_row: int
    num_rows: int
    source: int
    target: int


Holder = tuple[int, int, int]
"""(rank, first row, last row): a rank that uses these rows of an item, and holds their gradients afterwards."""


def sequence_shard(language: Grid, consumer: Consumer, tp: int, row_length: int | None = None) -> tuple[int, int]:
    """Token positions [low, high) whose hidden states live on tensor parallel rank `tp`.

    Args:
        row_length: tokens of the row; None for seq_length.
    """
    row_length = consumer.seq_length if row_length is None else row_length
    if not consumer.sequence_parallel:
        return 0, row_length
    length = row_length // language.tp
    return tp * length, (tp + 1) * length


def needed_rows(item: VisualItem, language: Grid, consumer: Consumer, tp: int, pp: int) -> tuple[int, int]:
    """Rows [first, last) of `item` that rank (tp, pp) of the item's language replica needs; empty when first >= last.

    A row at token position p is used at p by the decoder (first stage) and at p - 1 by MTP (last stage).
    """
    low, high = sequence_shard(language, consumer, tp, item.row_length)
    decoder = pp == 0
    mtp = consumer.mtp and pp == language.pp - 1
    if not decoder and not mtp:
        return 0, 0
    first_position = low if decoder else low + 1
    last_position = high + 1 if mtp else high
    first = max(first_position - item.start, 0)
    last = min(last_position - item.start, item.num_tokens)
    return (first, last) if first < last else (0, 0)


def forward_routes(
    items: Sequence[VisualItem], encode: Sequence[Sequence[int]], vision: Grid, language: Grid, consumer: Consumer
) -> list[Route]:
    """Routes of the embeddings, ordered by vision replica, then as encoded, then by target rank."""
    routes = []
    for v, index in ((v, index) for v, indexes in enumerate(encode) for index in indexes):
        item = items[index]
        makers = [vision.rank(tp=tp, dp=v) for tp in range(vision.tp)]
        for target, first, last in _consumers(item, language, consumer):
            source = target if target in makers else makers[target % vision.tp]
            routes.append(Route(item=index, first_row=first, num_rows=last - first, source=source, target=target))
    return routes


def backward_routes(
    items: Sequence[VisualItem], encode: Sequence[Sequence[int]], vision: Grid, language: Grid, consumer: Consumer
) -> list[Route]:
    """Routes of the gradients of those embeddings, in the same order; `source` is a language rank."""
    routes = []
    for v, index in ((v, index) for v, indexes in enumerate(encode) for index in indexes):
        item = items[index]
        makers = [vision.rank(tp=tp, dp=v) for tp in range(vision.tp)]
        holders = list(_consumers(item, language, consumer))
        if consumer.sequence_parallel:
            pairs = [(holder, target) for holder in holders for target in makers]
        else:
            pairs = _one_per_stage(holders, language, makers, index)
        for (source, first, last), target in pairs:
            routes.append(Route(item=index, first_row=first, num_rows=last - first, source=source, target=target))
    return routes


def stays_in_replica(vision: Grid, language: Grid, balance: str) -> bool:
    """Whether every image is encoded on ranks of the language replica that uses it, so that replicas exchange nothing.

    Args:
        balance: as in `data.assignment.assign`.
    """
    homes = [{language.coordinate(vision.rank(tp=tp, dp=d))["dp"] for tp in range(vision.tp)} for d in range(vision.dp)]
    return balance in ("none", "replica") and all(len(replicas) == 1 for replicas in homes)


def travelling_rows(routes: Sequence[Route]) -> int:
    """Rows that leave their rank: times row size, the bytes of an exchange over the whole job."""
    return sum(route.num_rows for route in routes if route.source != route.target)


def _consumers(item: VisualItem, language: Grid, consumer: Consumer) -> list[Holder]:
    """Every rank that needs rows of `item`, by ascending rank."""
    found = []
    for pp in range(language.pp):
        for tp in range(language.tp):
            first, last = needed_rows(item, language, consumer, tp, pp)
            if first < last:
                found.append((language.rank(tp=tp, dp=item.replica, pp=pp), first, last))
    return found


def _one_per_stage(holders: list[Holder], language: Grid, makers: list[int], index: int) -> list[tuple[Holder, int]]:
    """(holder, maker) pairs: of each stage's TP ranks, which hold equal gradients, the one that sends to a maker.

    A maker that holds the gradient itself takes its own; for the others the sender is dealt by item and maker.
    """
    pairs = []
    for pp in range(language.pp):
        stage = [holder for holder in holders if language.coordinate(holder[0])["pp"] == pp]
        for number, maker in enumerate(makers if stage else []):
            own = [holder for holder in stage if holder[0] == maker]
            pairs.append((own[0] if own else stage[(index + number) % len(stage)], maker))
    return pairs
