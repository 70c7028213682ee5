"""Processes that read ahead: the batches of a trainer that reads itself, no process left, nothing that waits for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flagscale.data.loader import DataPipeline
from flagscale.data.macro import count_macro_batches
from flagscale.data.workers import Parcel, WorkerReader
from flagscale.plan.layout import Grid
from flagscale.plan.plan import ExperimentPlan
from flagscale.train.failure import READER, explain
from flagscale.train.place import Place
from tests.data.helpers import make_config, make_plan, sharegpt, write_jsonl
from tests.data.test_loader import assert_same, pipelines, plan_for, sources

__all__ = ["sources"]  # a fixture
STEPS = (0, 1, 2, 7, 8, 7)  # a jump forward and one back
PACKED = {"packing": "length_budget", "language_balance": True}


def workers_of(pid: int | None = None) -> list[psutil.Process]:
    """Living children of a process, of this one when none is given."""
    return [child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(autouse=True)
def _none_is_left() -> Any:
    before = set(workers_of())
    yield
    assert set(workers_of()) == before


@pytest.mark.parametrize("packing", [{}, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_those_read_by_the_trainer(sources: dict[str, Path], workers: int, packing: dict[str, Any]) -> None:
    """Over several steps and restarts; the trainer decodes nothing itself and its random numbers stay as they are."""
    state = torch.get_rng_state()
    ahead_plan, plain_plan = plan_for(sources, workers=workers, **packing), plan_for(sources, prefetch=0, **packing)
    before = len(workers_of())
    with pipelines(ahead_plan, world=1) as (ahead,), pipelines(plain_plan, world=1) as (plain,):
        for step in STEPS:
            for one, other in zip(ahead.step(step), plain.step(step), strict=True):
                assert_same(one, other)
                assert len(workers_of()) == before + workers
            assert ahead.decoded == plain.decoded > 0
        assert ahead.corpus.decoded == 0
        assert ahead.wait_s > 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("workers", [1, 2])
def test_each_image_is_decoded_once_and_nothing_behind_the_end(sources: dict[str, Path], workers: int) -> None:
    """Also without `close`: at the end, and where a validation pauses, the processes have gone."""
    before = len(workers_of())
    for split, step in (("train", 99), ("valid", 0)):
        with pipelines(plan_for(sources, workers=workers), split) as ranks:
            for pipeline in ranks:
                assert len(list(pipeline.step(step))) == 2
            assert sum(p.decoded for p in ranks) == sum(len(spec.items) for spec in ranks[0].specs(step)) > 0
            assert len(workers_of()) == before
            assert list(ranks[0].step(step)), "it can be used again"


def test_macro_batches_are_counted_without_planning_them(sources: dict[str, Path]) -> None:
    counts = set()
    for packing in ({}, {"packing": "in_batch"}, PACKED):
        plan = plan_for(sources, (Grid(dp=4), Grid(tp=2, dp=2), (2, 2, 1)), **packing)
        with pipelines(plan, world=1) as (pipeline,):
            for step in range(8):
                found = count_macro_batches(pipeline.sample_ids(step), pipeline.corpus, plan)
                assert found == len(pipeline.specs(step))
                counts.add(found)
    assert len(counts) > 1


def mixed(folder: Path, **data: Any) -> ExperimentPlan:
    """Two sources of texts, one of even and one of odd answers."""
    entries = {}
    for number, name in enumerate(("even", "odd")):
        texts: list[Any] = [sharegpt("Which?", str(2 * i + number)) for i in range(20)]
        entries[name] = {"path": str(write_jsonl(folder / f"{name}.jsonl", texts)), "weight": 1.0}
    config = make_config(None, model={"global_batch_size": 8, "micro_batch_size": 2}, sources=entries, **data)
    return make_plan(config, Grid(), Grid(), (2, 2))


def test_a_changed_mix_and_a_restored_one_reach_the_processes(tmp_path: Path) -> None:
    """What they have read ahead is dropped."""
    plans = (mixed(tmp_path, workers=2), mixed(tmp_path, prefetch=0))
    seen: list[list[int]] = []
    with pipelines(plans[0]) as (ahead,), pipelines(plans[1]) as (plain,):
        for pipeline in (ahead, plain):
            list(pipeline.step(0))
        state = plain.state_dict(1)
        for pipeline in (ahead, plain):
            pipeline.change_mix(1, {"even": ((0, 0.0),), "odd": ((0, 1.0),)})
        for restored in (False, True):
            for pipeline in (ahead, plain):
                if restored:
                    pipeline.load_state_dict(state)
            for one, other in zip(ahead.step(1), plain.step(1), strict=True):
                assert_same(one, other)
                seen.append([i for text in one.microbatches for i in text.sample_ids])
    assert seen[:2] != seen[2:], "the mix was another one"


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGBUS])
@pytest.mark.timeout(60)
def test_a_killed_process_ends_the_run_with_what_would_help(sources: dict[str, Path], by: signal.Signals) -> None:
    plan = plan_for(sources, workers=2)
    before = set(workers_of())
    with pipelines(plan, world=1) as (pipeline,):
        list(pipeline.step(0))
        own = set(workers_of()) - before
        with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid") as found:
            own.pop().send_signal(by)
            for step in range(1, pipeline.num_batches):  # torch says so from a signal handler: at any point in here
                list(pipeline.step(step))
                time.sleep(0.01)
        assert len(list(pipeline.step(0))) == 2, "it can be used again"
    ending = explain(found.value, Place(), plan.config)
    assert ending is not None
    assert ending.kind == READER
    assert ending.message.startswith("lost a process that reads ahead")
    for part in ("is killed by signal", "/dev/shm", "data.workers (now 2)"):
        assert part in ending.message


@pytest.mark.timeout(60)
def test_no_room_in_shared_memory_ends_the_run(sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the reader: the queue that sends would only log it."""

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", full)
    plan = plan_for(sources, workers=1)
    with pipelines(plan, world=1) as (pipeline,):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="unable to allocate shared memory") as found:
                list(pipeline.step(0))
    ending = explain(found.value, Place(), plan.config)
    assert ending is not None
    assert ending.kind == READER
    assert ": unable to allocate shared memory(shm) for file" in ending.message.splitlines()[0]


def hold(plan: ExperimentPlan, answers: Connection) -> None:
    """A trainer that reads a macro batch and is then busy."""
    pipeline = DataPipeline(plan, "train", 0)
    next(pipeline.step(0))
    answers.send([child.pid for child in workers_of()])
    time.sleep(600)


@pytest.mark.timeout(60)
def test_processes_end_with_a_killed_trainer(sources: dict[str, Path]) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    trainer = context.Process(target=hold, args=(plan_for(sources, workers=2), theirs))
    trainer.start()
    assert ours.poll(30)
    pids = ours.recv()
    assert len(pids) == 2
    assert trainer.pid is not None
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.join()
    deadline = time.monotonic() + 2  # DataLoader's own watch looks every five seconds
    while left := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
        assert time.monotonic() < deadline, f"{left} live on"
        time.sleep(0.01)


def test_a_parcel_is_two_tensors_pinned_and_opened_as_views(
    sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pipelines(plan_for(sources, prefetch=0), world=1) as (pipeline,):
        macro = next(pipeline.step(0))
    assert len(macro.tensors()) > 8
    parcel = Parcel.of(macro, 3)
    assert all(one.is_shared() for one in parcel.joined)
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned.append(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    opened = parcel.pin_memory().opened()
    assert_same(opened, macro)
    assert {one.untyped_storage().data_ptr() for one in opened.tensors()} == set(pinned)
    assert len(pinned) == 2
    without = replace(macro, pixels={})
    assert_same(Parcel.of(without, 0).opened(), without)


def test_ready_are_as_many_as_asked_rounded_up(sources: dict[str, Path]) -> None:
    for workers, prefetch, ready in ((1, 3, 3), (2, 3, 4), (2, 4, 4)):
        with pipelines(plan_for(sources, workers=workers, prefetch=prefetch), world=1) as (pipeline,):
            next(pipeline.step(0))
            assert isinstance(pipeline._prefetcher, WorkerReader)
            results: Any = pipeline._prefetcher._results
            assert len(results._task_info) == ready
