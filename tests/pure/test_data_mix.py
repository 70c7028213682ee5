"""The mix of sources: weights by step, exact shares, a cursor each, and going on from a few saved numbers."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.errors import ConfigError, UserError
from flagscale.config.mix import sources_are_complete, training_sources, weight_at, weight_points
from flagscale.data.mix import MixSampler
from tests.data.helpers import make_config

SIZES = (7, 30, 12)
NAMES = ("a", "b", "c")


def sampler(*weights: Any, batch: int = 10, seed: int = 5) -> MixSampler:
    points = tuple(weight_points(weight) for weight in weights or (1.0, 2.0, 1.0))
    return MixSampler(names=NAMES, sizes=SIZES, weights=points, global_batch_size=batch, seed=seed)


def by_source(ids: list[int]) -> list[list[int]]:
    bounds = (0, 7, 37, 49)
    return [[i - bounds[s] for i in ids if bounds[s] <= i < bounds[s + 1]] for s in range(3)]


def test_weights_are_ramps_and_jumps() -> None:
    ramp = weight_points([[10, 1.0], [20, 0.0], [20, 4], [30, 4.0]])
    assert [weight_at(ramp, step) for step in (0, 10, 15, 19, 20, 25, 99)] == [1, 1, 0.5, pytest.approx(0.1), 4, 4, 4]
    assert weight_at(weight_points(3), 7) == 3


@pytest.mark.parametrize("value", ["much", True, [], [[1]], [[0, 1], [5, "x"]], [[5, 1], [0, 1]], [[-1, 1]], -0.5,
    float("nan"), float("inf"), 10**400, [[float("nan"), 1]]])  # fmt: skip
def test_weights_that_are_none_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"must be|steps that do not ascend|below 0"):
        weight_points(value)


@pytest.mark.parametrize(
    ("sources", "key", "cause"),
    [
        ({"a": "x.jsonl"}, "data.sources.a", "must have a path"),
        ({"a": {"weight": 1}}, "data.sources.a", "must have a path"),
        ({"a": {"path": "x", "wieght": 1}}, "data.sources.a", "nothing else"),
        ({"a": {"path": "x", "weight": -1}}, "data.sources.a.weight", "below 0"),
        ({"a": {"path": "x", "weight": 0}, "b": {"path": "y", "weight": [[3, 0], [5, 1]]}}, "data.sources", "step 0"),
    ],
)
def test_sources_that_are_incomplete_are_named(sources: dict[str, Any], key: str, cause: str) -> None:
    (error,) = sources_are_complete(make_config(Path("t"), sources=sources))
    assert isinstance(error, ConfigError)
    assert error.key == key
    assert cause in str(error)


def test_a_single_path_is_a_source() -> None:
    assert [spec.path for spec in training_sources(make_config(Path("t.jsonl")))] == ["t.jsonl"]
    with pytest.raises(ConfigError, match="must be given"):
        training_sources(make_config(None))


@settings(deadline=None, max_examples=40)
@given(weights=st.tuples(*[st.floats(0, 5)] * 3).filter(lambda w: sum(w) > 0.1), batch=st.integers(1, 40))
def test_shares_are_exact_in_the_long_run_and_sources_are_read_in_their_own_order(
    weights: tuple[float, ...], batch: int
) -> None:
    mixed = sampler(*weights, batch=batch)
    drawn: list[list[int]] = [[], [], []]
    for step in range(12):
        ids = mixed.sample_ids(step)
        assert len(ids) == batch
        counts = mixed.counts(step)
        for source, own in enumerate(by_source(ids)):
            assert len(own) == counts[source]
            drawn[source] += own
            due = (step + 1) * batch * weights[source] / sum(weights)
            assert abs(len(drawn[source]) - due) <= 2, "more than rounding away from its share"
    for source, own in enumerate(drawn):
        size = SIZES[source]
        whole = len(own) // size * size
        batches = [sorted(own[i : i + size]) for i in range(0, whole, size)] if batch == 1 else []
        assert all(epoch == list(range(size)) for epoch in batches)
        assert all(own.count(i) >= len(own) // size for i in range(size)), "a sample is missing in an epoch"


@settings(deadline=None, max_examples=60)
@given(stop=st.integers(0, 30), change=st.integers(0, 30), ahead=st.integers(0, 5))
def test_going_on_from_a_checkpoint_equals_an_unbroken_run(stop: int, change: int, ahead: int) -> None:
    """Also when more was read ahead than was used, and when the weights were changed before or after."""
    ramp = ([[0, 1.0], [20, 0.0]], 2.0, [[5, 0.0], [5, 3.0]])
    weights = {"a": weight_points(0.0), "b": weight_points(5.0)}
    unbroken = sampler(*ramp)
    expected = []
    for step in range(40):
        if step == change:
            unbroken.change(step, weights)
        expected.append(unbroken.sample_ids(step))
    first = sampler(*ramp)
    for step in range(stop):
        if step == change:
            first.change(step, weights)
        first.sample_ids(step + ahead)
        assert first.sample_ids(step) == expected[step]
    saved = json.loads(json.dumps(first.state_dict(stop)))  # a checkpoint holds plain numbers
    second = sampler(*ramp)
    second.load_state_dict(saved)
    for step in range(stop, 40):
        if step == change:
            second.change(step, weights)
        assert second.sample_ids(step) == expected[step]
    with pytest.raises(IndexError, match="lies before"):
        second.sample_ids(stop - 1)


def test_weights_that_would_all_be_zero_are_found_before_they_are_used() -> None:
    """Also at a step that is still to come, and together with sources that the change does not name."""
    mixed = sampler(1.0, [[0, 1.0], [10, 0.0]], 0.0)
    assert mixed.first_empty_step(3, {"a": weight_points(0.0)}) == 10
    assert mixed.first_empty_step(12, {"a": weight_points(0.0)}) == 12
    assert mixed.first_empty_step(3, {"a": weight_points([[0, 1.0], [20, 0.0]])}) == 20
    assert mixed.first_empty_step(3, {"a": weight_points(0.0), "c": weight_points(0.1)}) is None
    mixed.change(3, {"a": weight_points(0.0)})
    assert len(mixed.sample_ids(9)) == 10
    with pytest.raises(UserError, match=r"a, b, c are all 0 at step 10"):
        mixed.sample_ids(10)


def test_two_threads_may_draw_at_once() -> None:
    """The one that trains and the one that reads ahead."""
    expected = [sampler().sample_ids(step) for step in range(400)]
    mixed, found = sampler(), [None, None]

    def draw(thread: int) -> None:
        found[thread] = [mixed.sample_ids(step) for step in range(400)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=draw, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert found == [expected, expected]


def test_resuming_costs_the_same_after_a_billion_steps() -> None:
    state = {"step": 10**9, "cursors": {"a": 10**10, "b": 3, "c": 5}, "owed": {}, "weights": None}
    start = time.perf_counter()
    mixed = sampler()
    mixed.load_state_dict(state)
    assert len(mixed.sample_ids(10**9 + 20)) == 10
    assert time.perf_counter() - start < 0.5
    assert len(json.dumps(mixed.state_dict(10**9 + 20))) < 400


def test_a_source_keeps_its_order_whatever_the_others_are() -> None:
    alone = MixSampler(names=("b",), sizes=(30,), weights=(((0, 1.0),),), global_batch_size=30, seed=5)
    together = [i for step in range(6) for i in by_source(sampler().sample_ids(step))[1]]
    assert sorted(together) == sorted(alone.sample_ids(0))
    resumed = sampler()
    resumed.load_state_dict({"step": 3, "cursors": {"b": 30}, "owed": {}, "weights": None})
    assert resumed.state_dict(3)["cursors"] == {"a": 0, "b": 30, "c": 0}, "a source that is new starts at its beginning"
