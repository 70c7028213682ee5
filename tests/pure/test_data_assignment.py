"""Who encodes what: complete, within its bounds, even, and the same everywhere."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flagscale.data.assignment import VisualItem, assign, share_reads
from flagscale.plan.layout import Grid

GRIDS = [
    (Grid(dp=4), Grid(tp=2, dp=2)),
    (Grid(tp=2, dp=2), Grid(dp=4)),
    (Grid(tp=4), Grid(dp=4)),
    (Grid(dp=6), Grid(tp=2, dp=3)),
    (Grid(tp=3, dp=2), Grid(tp=2, dp=3)),
    (Grid(dp=8), Grid(tp=2, dp=2, pp=2)),
    (Grid(tp=2, dp=2), Grid(tp=2, dp=2, pp=2)),
]
BALANCES = ["none", "replica", "node", "world"]


def make_items(patches: Sequence[int], replicas: int) -> list[VisualItem]:
    return [
        VisualItem(
            index=i,
            microbatch=0,
            replica=i % replicas,
            slot=i // replicas,
            start=0,
            grid_h=1,
            grid_w=size,
            num_tokens=size // 4,
            media=0,
            frame=-1,
        )
        for i, size in enumerate(patches)
    ]


def check_each_once(encode: Sequence[Sequence[int]], reads: dict[int, tuple[int, ...]], count: int) -> None:
    """Every item is encoded by one coordinate and read by one rank."""
    assert sorted(i for share in encode for i in share) == list(range(count))
    assert sorted(i for share in reads.values() for i in share) == list(range(count))


def load_ratio(encode: Sequence[Sequence[int]], costs: Sequence[int]) -> float:
    return max(sum(costs[i] for i in share) for share in encode) * len(encode) / sum(costs)


@settings(deadline=None, max_examples=150)
@given(
    grids=st.sampled_from(GRIDS),
    balance=st.sampled_from(BALANCES),
    patches=st.lists(st.integers(4, 5000), max_size=40),
    ranks_per_node=st.sampled_from([1, 2, 3, 4, 8]),
)
def test_each_item_once_and_where_it_may_be(
    grids: tuple[Grid, Grid], balance: str, patches: list[int], ranks_per_node: int
) -> None:
    vision, language = grids
    items = make_items(patches, language.dp)
    encode = assign(items, patches, vision, language, balance, ranks_per_node)
    reads = share_reads(encode, items, vision)
    check_each_once(encode, reads, len(items))
    assert len(encode) == vision.dp
    assert all(list(share) == sorted(share) for share in encode)
    owner = {i: d for d, share in enumerate(encode) for i in share}
    for rank, indexes in reads.items():
        assert all(owner[i] == vision.coordinate(rank)["dp"] for i in indexes)
    span = {"none": 1, "replica": 1, "node": ranks_per_node, "world": 10**6}[balance]
    for item in items:
        homes = {rank // span for rank in language.ranks if language.coordinate(rank)["dp"] == item.replica}
        encoders = {rank // span for rank in vision.ranks if vision.coordinate(rank)["dp"] == owner[item.index]}
        assert homes & encoders, f"{balance}: item {item} left its replica"
    assert encode == assign(items, patches, vision, language, balance, ranks_per_node)


def test_an_item_read_twice_or_lost_is_noticed() -> None:
    """Negative control of `check_each_once`."""
    vision, language = Grid(tp=2, dp=2), Grid(dp=4)
    items = make_items([16] * 8, 4)
    encode = assign(items, [1] * 8, vision, language, "world", 4)
    reads = share_reads(encode, items, vision)
    check_each_once(encode, reads, 8)
    twice = {rank: indexes if rank else (*indexes, reads[1][0]) for rank, indexes in reads.items()}
    lost = {rank: indexes if rank else indexes[1:] for rank, indexes in reads.items()}
    for broken in (twice, lost):
        with pytest.raises(AssertionError):
            check_each_once(encode, broken, 8)


def log_normal_patches(count: int, seed: int) -> list[int]:
    """Patch counts of sigma 1 within 64..4096."""
    rng = random.Random(seed)
    return [round(min(4096, max(64, rng.lognormvariate(math.log(512), 1)))) for _ in range(count)]


@settings(deadline=None, max_examples=200, derandomize=True)
@given(seed=st.integers(0, 2**32), count=st.integers(32, 96), quadratic=st.sampled_from([0, 1, 4]))
def test_log_normal_sizes_are_evened_out_over_the_world(seed: int, count: int, quadratic: int) -> None:
    patches = log_normal_patches(count, seed)
    costs = [size * (4096 + quadratic * size) for size in patches]
    assume(max(costs) * 8 <= sum(costs))
    encode = assign(make_items(patches, 4), costs, Grid(dp=8), Grid(tp=2, dp=4), "world", 8)
    assert load_ratio(encode, costs) <= 1.05


def test_sample_order_alone_does_not_even_out() -> None:
    """Negative control of the bound above: dealt in sample order, log-normal sizes are far from it."""
    patches = log_normal_patches(32, 3)
    encode = assign(make_items(patches, 4), patches, Grid(dp=8), Grid(tp=2, dp=4), "none", 8)
    assert load_ratio(encode, patches) > 1.3


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize(("vision", "language"), [grids for grids in GRIDS if grids[0].dp % grids[1].dp == 0])
def test_an_equal_load_stays_equal(vision: Grid, language: Grid, balance: str) -> None:
    items = make_items([256] * (vision.dp * 4), language.dp)
    encode = assign(items, [7] * len(items), vision, language, balance, 2)
    assert [len(share) for share in encode] == [4] * vision.dp


def test_unified_with_pipeline_encodes_on_the_first_stage_of_the_replica() -> None:
    items = make_items([100, 200, 300, 400, 500, 600], 2)
    encode = assign(items, [1] * 6, Grid(tp=2, dp=2), Grid(tp=2, dp=2, pp=2), "replica", 8)
    assert encode == ((0, 2, 4), (1, 3, 5))


def test_reading_is_shared_by_patches_over_tensor_parallel_ranks() -> None:
    items = make_items([400, 100, 100, 100, 100], 1)
    reads = share_reads([(0, 1, 2, 3, 4)], items, Grid(tp=2))
    assert reads == {0: (0,), 1: (1, 2, 3, 4)}


def test_many_items_on_a_large_cluster_are_assigned_quickly() -> None:
    patches = log_normal_patches(4096, 0)
    items = make_items(patches, 128)
    start = time.perf_counter()
    encode = assign(items, patches, Grid(dp=512), Grid(tp=4, dp=128), "world", 8)
    assert time.perf_counter() - start < 10
    assert load_ratio(encode, patches) <= 1.05
