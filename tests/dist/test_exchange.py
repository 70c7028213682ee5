"""The exchange on real ranks against a table worked out per token position, and its adjoint by the inner product."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flagscale.data.assignment import VisualItem, assign
from flagscale.parallel import routes as routes_module
from flagscale.parallel.exchange import Exchange
from flagscale.parallel.routes import (
    Consumer,
    Holder,
    Route,
    backward_routes,
    forward_routes,
    sequence_shard,
    stays_in_replica,
)
from flagscale.plan.layout import Grid
from tests.dist.pool import RankFailure, run_ranks

WIDTH = 3
SEQ = 24

LAYOUTS = [  # world, vision, language, sequence parallel
    (4, Grid(tp=1, dp=4), Grid(tp=2, dp=2), False),
    (4, Grid(tp=1, dp=4), Grid(tp=2, dp=2), True),
    (4, Grid(tp=2, dp=2), Grid(tp=1, dp=4), False),
    (4, Grid(tp=2, dp=2), Grid(tp=2, dp=2), False),  # unified without stages: nothing travels
    (4, Grid(tp=4), Grid(tp=2, dp=2), False),
    (4, Grid(tp=2, dp=2), Grid(tp=2, pp=2), True),
    (4, Grid(tp=2, dp=2), Grid(tp=2, pp=2), False),
    (4, Grid(tp=1, dp=4), Grid(pp=4), False),
    (4, Grid(tp=4, dp=1), Grid(tp=4, dp=1), True),
    (4, Grid(tp=2, dp=1), Grid(tp=2, pp=2), False),  # unified with stages: the encoder on the first stage only
    (6, Grid(tp=1, dp=6), Grid(tp=2, dp=3), True),
    (6, Grid(tp=3, dp=2), Grid(tp=2, dp=3), False),
]


def random_items(seed: int, replicas: int, micro_batch_size: int, microbatches: int) -> list[VisualItem]:
    """0 to 3 images a sample, of 1 to 6 tokens, at increasing positions; some samples have none."""
    draw = random.Random(seed)
    items: list[VisualItem] = []
    for m in range(microbatches):
        for replica in range(replicas):
            for slot in range(micro_batch_size):
                start = draw.randrange(0, 3)
                for media in range(draw.choice([0, 0, 1, 3])):
                    tokens = draw.randrange(1, 7)
                    if start + tokens > SEQ:
                        break
                    items.append(
                        VisualItem(
                            index=len(items), microbatch=m, replica=replica, slot=slot, start=start, grid_h=2,
                            grid_w=2 * tokens, num_tokens=tokens, media=media, frame=-1,
                        )
                    )  # fmt: skip
                    start += tokens + draw.randrange(1, 4)
    return items


def row_value(item: int, row: int) -> torch.Tensor:
    """A row that exists once in the job."""
    return torch.tensor([100.0 * item + row, 1.0 + item, 1.0 + row])


def use_weight(item: VisualItem, row: int, use: int) -> float:
    """What one use (0 decoder, 1 MTP) of a row counts in the loss."""
    return 1.0 + item.index + 0.1 * row + 0.01 * use


def check_case(
    vision: Grid, language: Grid, sequence_parallel: bool, seed: int, replica: dist.ProcessGroup | None = None
) -> int:
    """Forward placement and gradients of one random macro batch on this rank; returns rows that travelled.

    Args:
        replica: ranks of this rank's language replica, to exchange rows among them where no other has a part in it.
    """
    rank, micro_batch_size, microbatches = dist.get_rank(), 2, 2
    consumer = Consumer(seq_length=SEQ, sequence_parallel=sequence_parallel, mtp=seed % 2 == 0)
    items = random_items(seed, language.dp, micro_batch_size, microbatches)
    balance = random.Random(seed).choice(["none", "replica", "node", "world"])
    encode = assign(items, [item.num_patches**2 for item in items], vision, language, balance, 2)
    group = replica if replica and stays_in_replica(vision, language, balance) else dist.group.WORLD
    exchange = Exchange(
        items, encode, vision=vision, language=language, consumer=consumer, rank=rank,
        micro_batch_size=micro_batch_size, group=group,
    )  # fmt: skip
    own = [items[i] for i in encode[vision.coordinate(rank)["dp"]]] if rank in vision else []
    parts = [row_value(item.index, row)[None] for item in own for row in range(item.num_tokens)]
    rows_RD = exchange.send_embeddings(torch.cat(parts) if parts else torch.zeros(0, WIDTH))
    place = language.coordinate(rank)
    low, high = sequence_shard(language, consumer, place["tp"])
    uses = [(0, place["pp"] == 0), (1, consumer.mtp and place["pp"] == language.pp - 1)]
    gradients = []
    for m in range(microbatches):
        leaf = rows_RD[exchange.microbatch_slice(m)].clone().requires_grad_()
        visual = exchange.visual_rows(leaf, m)
        loss = leaf.sum() * 0.0
        columns = [(visual.decoder_source, visual.decoder_target), (visual.mtp_source, visual.mtp_target)]
        for (use, active), (source, target) in zip(uses, columns, strict=True):
            expected = {}
            for item in items:
                if active and item.microbatch == m and item.replica == place["dp"]:
                    for row in range(item.num_tokens):
                        position = item.start + row - use
                        if low <= position < high:
                            expected[(position - low) * micro_batch_size + item.slot] = (item, row)
            assert sorted(target.tolist()) == sorted(expected)
            for s, t in zip(source.tolist(), target.tolist(), strict=True):
                item, row = expected[t]
                assert torch.equal(leaf[s].detach(), row_value(item.index, row))
                loss = loss + use_weight(item, row, use) * leaf[s].sum()
        loss.backward()
        gradients.append(leaf.grad)
    grads_VD = exchange.send_gradients(torch.cat(gradients))
    wanted = [
        use_weight(item, row, 0) + (use_weight(item, row, 1) if consumer.mtp and item.start + row > 0 else 0.0)
        for item in own
        for row in range(item.num_tokens)
    ]
    torch.testing.assert_close(grads_VD, torch.tensor(wanted).reshape(-1, 1).expand(-1, WIDTH))
    return exchange.travelling_rows(backward=True)


def run_cases(layouts: list[tuple[Grid, Grid, bool]], seeds: list[int]) -> list[int]:
    found = []
    for vision, language, sequence_parallel in layouts:
        replicas = {tuple(ranks): dist.new_group(ranks) for ranks in language.groups("tp", "pp")}
        (own,) = (group for ranks, group in replicas.items() if dist.get_rank() in ranks)
        found += [check_case(vision, language, sequence_parallel, seed, own) for seed in seeds]
        dist.barrier()
        dist.destroy_process_group(own)
    return found


@pytest.mark.parametrize("world", [4, 6])
def test_rows_reach_every_use_and_gradients_return(world: int) -> None:
    layouts = [layout[1:] for layout in LAYOUTS if layout[0] == world]
    counted = run_ranks(world, run_cases, layouts, list(range(12)))
    assert all(ranks == counted[0] for ranks in counted), "ranks disagree on the traffic"


def lose_the_choice_of_sender(*args: object) -> list[object]:
    """Breaks the adjoint on purpose: every TP rank sends its copy of a gradient."""

    def everyone(holders: list[Holder], language: Grid, makers: list[int], index: int) -> list[tuple[Holder, int]]:
        return [(holder, maker) for holder in holders for maker in makers]

    with mock.patch.object(routes_module, "_one_per_stage", everyone):
        return [check_case(*args, seed) for seed in range(4)]


def swap_rows(*args: object) -> list[object]:
    """Breaks the order on purpose: the encoder's items are taken in reverse where rows are sent."""
    saved = Exchange._made_rows
    Exchange._made_rows = lambda self, encode, vision, rank: saved(self, [e[::-1] for e in encode], vision, rank)
    try:
        return [check_case(*args, seed) for seed in range(4)]
    finally:
        Exchange._made_rows = saved


@pytest.mark.parametrize("breakage", [lose_the_choice_of_sender, swap_rows])
def test_the_check_sees_a_broken_rule(breakage: object) -> None:
    _, vision, language, sequence_parallel = LAYOUTS[0]
    with pytest.raises(RankFailure, match=r"AssertionError|not close"):
        run_ranks(4, breakage, vision, language, sequence_parallel)


@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize(("world", "vision", "language", "sequence_parallel"), LAYOUTS)
def test_travelling_rows_are_the_minimum(
    world: int, vision: Grid, language: Grid, sequence_parallel: bool, mtp: bool
) -> None:
    """Counted by token position: what a rank needs and does not hold already, once, and nothing else.

    Forward: a row for each rank that uses it and has not encoded it. Backward: for each rank that encoded a row, what
    each rank with sequence parallelism, and each stage without, says of the row, unless it is one of those.
    """
    consumer = Consumer(seq_length=SEQ, sequence_parallel=sequence_parallel, mtp=mtp)
    items = random_items(3, language.dp, 2, 2)
    encode = assign(items, [1] * len(items), vision, language, "world", 2)
    there, back = least(items, encode, vision, language, consumer)
    moved = travelling(forward_routes(items, encode, vision, language, consumer))
    # The MTP use of a row at token 0 does not exist; a contiguous run may still carry that row to the last stage.
    at_0 = {(item.index, row) for item in items for row in range(item.num_tokens) if item.start + row == 0}
    assert len(moved) == len(set(moved))
    received = {(i, r, target) for i, r, _, target in moved if (i, r) not in at_0}
    assert received == {t for t in there if t[:2] not in at_0}
    returned = travelling(backward_routes(items, encode, vision, language, consumer))
    said = [
        (i, r, target, source if sequence_parallel else language.coordinate(source)["pp"])
        for i, r, source, target in returned
        if (i, r) not in at_0
    ]
    assert len(said) == len(set(said))
    assert set(said) == {b for b in back if b[:2] not in at_0}


def least(
    items: Sequence[VisualItem], encode: Sequence[Sequence[int]], vision: Grid, language: Grid, consumer: Consumer
) -> tuple[set[tuple[int, int, int]], set[tuple[int, int, int, int]]]:
    """What has to travel, by token position: there (item, row, user), back (item, row, maker, rank or stage)."""

    def voice(rank: int) -> int:
        """Ranks whose gradients of a row are equal have one voice: those of a stage, without sequence parallelism."""
        return rank if consumer.sequence_parallel else language.coordinate(rank)["pp"]

    owner = {i: v for v, indexes in enumerate(encode) for i in indexes}
    there, back = set(), set()
    for item in items:
        makers = {rank for rank in vision.ranks if vision.coordinate(rank)["dp"] == owner[item.index]}
        for row in range(item.num_tokens):
            users = {rank for rank in language.ranks if uses(item, row, language, consumer, rank)}
            there |= {(item.index, row, user) for user in users - makers}
            saying = {voice(user) for user in users}
            for maker in makers:
                others = saying - {voice(maker)} if maker in users else saying
                back |= {(item.index, row, maker, one) for one in others}
    return there, back


@pytest.mark.parametrize("grid", [Grid(tp=2, dp=2), Grid(tp=4), Grid(dp=4)], ids=str)
def test_unified_sends_nothing(grid: Grid) -> None:
    """Without sequence parallelism every rank has made the rows it uses, and holds their whole gradient."""
    consumer = Consumer(seq_length=SEQ, sequence_parallel=False, mtp=True)
    items = random_items(5, grid.dp, 2, 2)
    encode = assign(items, [1] * len(items), grid, grid, "replica", 2)
    for rule in (forward_routes, backward_routes):
        routes = rule(items, encode, grid, grid, consumer)
        assert routes
        assert not travelling(routes)


def uses(item: VisualItem, row: int, language: Grid, consumer: Consumer, rank: int) -> bool:
    """Whether a rank's language model reads a row of an item: at its token, or at the one before for MTP."""
    place = language.coordinate(rank)
    low, high = sequence_shard(language, consumer, place["tp"])
    position = item.start + row
    decoder = place["pp"] == 0 and low <= position < high
    mtp = consumer.mtp and place["pp"] == language.pp - 1 and low <= position - 1 < high
    return place["dp"] == item.replica and (decoder or mtp)


def travelling(routes: list[Route]) -> list[tuple[int, int, int, int]]:
    """(item, row, source, target) of every row that leaves its rank."""
    return [
        (route.item, row, route.source, route.target)
        for route in routes
        if route.source != route.target
        for row in range(route.first_row, route.first_row + route.num_rows)
    ]
