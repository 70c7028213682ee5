"""The exchange on real ranks against a table worked out per token position, and its adjoint by the inner product."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from flagscale.data.assignment import VisualItem, assign
from flagscale.parallel import exchange as exchange_module
from flagscale.parallel.exchange import Exchange
from flagscale.parallel.routes import Consumer, backward_routes, forward_routes, sequence_shard
from flagscale.plan.layout import Grid
from tests.dist.pool import RankFailure, run_ranks

WIDTH = 3
SEQ = 24

LAYOUTS = [  # world, vision, language, sequence parallel
    (4, Grid(tp=1, dp=4), Grid(tp=2, dp=2), False),
    (4, Grid(tp=1, dp=4), Grid(tp=2, dp=2), True),
    (4, Grid(tp=2, dp=2), Grid(tp=1, dp=4), False),
    (4, Grid(tp=2, dp=2), Grid(tp=2, pp=2), True),
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


def check_case(vision: Grid, language: Grid, sequence_parallel: bool, seed: int) -> int:
    """Forward placement and gradients of one random macro batch on this rank; returns rows that travelled."""
    rank, micro_batch_size, microbatches = dist.get_rank(), 2, 2
    consumer = Consumer(seq_length=SEQ, sequence_parallel=sequence_parallel, mtp=seed % 2 == 0)
    items = random_items(seed, language.dp, micro_batch_size, microbatches)
    balance = random.Random(seed).choice(["none", "replica", "node", "world"])
    encode = assign(items, [item.num_patches**2 for item in items], vision, language, balance, 2)
    exchange = Exchange(
        items, encode, vision=vision, language=language, consumer=consumer, rank=rank, micro_batch_size=micro_batch_size
    )
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
    return [check_case(*layout, seed) for layout in layouts for seed in seeds]


@pytest.mark.parametrize("world", [4, 6])
def test_rows_reach_every_use_and_gradients_return(world: int) -> None:
    layouts = [layout[1:] for layout in LAYOUTS if layout[0] == world]
    counted = run_ranks(world, run_cases, layouts, list(range(12)))
    assert all(ranks == counted[0] for ranks in counted), "ranks disagree on the traffic"


def lose_the_choice_of_sender(*args: object) -> list[object]:
    """Breaks the adjoint on purpose: every TP rank sends its copy of a gradient."""
    saved = exchange_module.backward_routes
    routes = __import__("flagscale.parallel.routes", fromlist=["_one_per_stage"])
    one = routes._one_per_stage
    routes._one_per_stage = lambda holders, *rest: holders
    try:
        return [check_case(*args, seed) for seed in range(4)]
    finally:
        routes._one_per_stage = one
        exchange_module.backward_routes = saved


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


@pytest.mark.parametrize(("world", "vision", "language", "sequence_parallel"), LAYOUTS)
def test_travelling_rows_are_the_minimum(world: int, vision: Grid, language: Grid, sequence_parallel: bool) -> None:
    """Forward: each (row, rank that uses it) pair once, unless the rank encoded the row itself. Counted by position."""
    consumer = Consumer(seq_length=SEQ, sequence_parallel=sequence_parallel, mtp=True)
    items = random_items(3, language.dp, 2, 2)
    encode = assign(items, [1] * len(items), vision, language, "world", 2)
    owner = {i: v for v, indexes in enumerate(encode) for i in indexes}
    pairs = set()
    for item in items:
        for rank in language.ranks:
            place = language.coordinate(rank)
            low, high = sequence_shard(language, consumer, place["tp"])
            for row in range(item.num_tokens):
                position = item.start + row
                decoder = place["pp"] == 0 and low <= position < high
                mtp = place["pp"] == language.pp - 1 and low <= position - 1 < high
                holds = rank in vision and vision.coordinate(rank)["dp"] == owner[item.index]
                if place["dp"] == item.replica and (decoder or mtp) and not holds:
                    pairs.add((item.index, row, rank))
    routes = forward_routes(items, encode, vision, language, consumer)
    moved = [
        (route.item, row, route.target)
        for route in routes
        if route.source != route.target
        for row in range(route.first_row, route.first_row + route.num_rows)
    ]
    # The MTP use of a row at token 0 does not exist; a contiguous run may still carry that row to the last stage.
    surplus = {m for m in moved if items[m[0]].start + m[1] == 0}
    assert len(moved) == len(set(moved))
    assert set(moved) - surplus == pairs - surplus
    backward = backward_routes(items, encode, vision, language, consumer)
    assert all(route.num_rows > 0 for route in routes + backward)
