"""The order of samples: a permutation an epoch, a pure function of the step."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.data.sampler import NO_SAMPLE, SequentialSampler, ShuffledSource, permute


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 700), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_permute_moves_samples_about_evenly() -> None:
    """Over many keys every sample takes every place equally often: chi-square of an 8 x 8 table, 49 free cells."""
    keys, size = 4000, 8
    counts = [[0] * size for _ in range(size)]
    for key in range(keys):
        for i in range(size):
            counts[i][permute(i, size, key)] += 1
    expected = keys / size
    assert sum((count - expected) ** 2 / expected for row in counts for count in row) < 100  # p = 2e-5


def test_permute_refuses_what_is_outside() -> None:
    with pytest.raises(IndexError):
        permute(5, 5, 0)


@settings(deadline=None, max_examples=60)
@given(num_samples=st.integers(1, 60), seed=st.integers(-5, 2**40))
def test_every_sample_once_an_epoch(num_samples: int, seed: int) -> None:
    source = ShuffledSource(num_samples=num_samples, seed=seed)
    order = [source.sample_at(position) for position in range(3 * num_samples)]
    for epoch in range(3):
        assert sorted(order[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))


def test_epochs_and_seeds_have_their_own_orders() -> None:
    orders = {
        tuple(ShuffledSource(num_samples=50, seed=seed).sample_at(50 * epoch + i) for i in range(50))
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100


def test_a_late_position_of_a_large_source_costs_no_more() -> None:
    source = ShuffledSource(num_samples=10_000_000, seed=1)
    start = time.perf_counter()
    ids = [source.sample_at(64 * 10**9 + i) for i in range(64)]
    assert time.perf_counter() - start < 0.5
    assert all(0 <= i < 10_000_000 for i in ids)


def test_validation_takes_each_sample_once_and_fills_up() -> None:
    sampler = SequentialSampler(num_samples=10, global_batch_size=4)
    assert sampler.num_batches == 3
    assert [sampler.sample_ids(step) for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, NO_SAMPLE, NO_SAMPLE]]
