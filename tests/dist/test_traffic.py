"""Nothing twice: bytes that really travel against the reported and the least, files decoded over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flagscale.data import macro as macro_module
from flagscale.data.loader import TRAIN, DataPipeline
from flagscale.data.macro import MacroBatch
from flagscale.parallel import exchange as exchange_module
from flagscale.parallel.routes import Consumer
from flagscale.plan.layout import Grid
from flagscale.plan.plan import ExperimentPlan
from flagscale.train.step import TrainStep
from tests.data import helpers
from tests.dist.harness import build_state, loss_weights, macro_batches, make_plan
from tests.dist.pool import run_ranks
from tests.dist.test_exchange import least
from tests.dist.test_gradients import LAYOUTS, MIXED, batch_keys


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that left their rank as counted at the collectives, as reported, and the least possible.

    `groups` are the groups of ranks with which this rank took part in an exchange.
    """

    sent: int
    reported: int
    minimum: int
    groups: set[tuple[int, ...]]


def traffic_of_a_step(plan: ExperimentPlan) -> Traffic:
    """What the exchanges of a step moved over the whole job."""
    state = build_state(plan)
    plain, sent, calls = dist.all_to_all_single, torch.zeros((), dtype=torch.long), []

    def counted(
        output: torch.Tensor, rows: torch.Tensor, receive: list[int], send: list[int], *, group: dist.ProcessGroup
    ) -> None:
        own = group.rank()
        sent.add_(sum(count for peer, count in enumerate(send) if peer != own) * rows.shape[1] * rows.itemsize)
        calls.append(tuple(dist.get_process_group_ranks(group)))
        plain(output, rows, receive, send, group=group)

    try:
        batches = macro_batches(plan, MIXED, dist.get_rank())
        with mock.patch.object(exchange_module.dist, "all_to_all_single", counted):
            report = TrainStep(state).accumulate(batches, loss_weights(plan, MIXED))
        dist.all_reduce(sent)
        minimum = sum(least_rows(plan, batch) for batch in batches) * plan.config.model.hidden_size * 4
        return Traffic(sent=int(sent), reported=report.exchange_bytes, minimum=minimum, groups=set(calls))
    finally:
        state.topology.destroy()


def least_rows(plan: ExperimentPlan, batch: MacroBatch) -> int:
    """Rows that have to leave their rank for a macro batch, counted by token position."""
    model = plan.config.model
    consumer = Consumer(
        seq_length=model.seq_length, sequence_parallel=model.sequence_parallel, mtp=model.mtp_num_layers > 0
    )
    there, back = least(batch.spec.items, batch.spec.encode, plan.vision, plan.language, consumer)
    return len(there) + (0 if model.freeze_vision and model.freeze_merger else len(back))


@pytest.mark.parametrize("keys", [{}, {"freeze_vision": True, "freeze_merger": True}], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    "name", ["vit_dp4-llm_tp2dp2-sp", "vit_dp4-llm_tp2pp2", "vit_tp2dp2-llm_dp4", "vit_tp2dp2-llm_tp2dp2"]
)
def test_reported_bytes_are_those_that_travel_and_the_least(name: str, keys: dict[str, Any]) -> None:
    world, layout = LAYOUTS[name]
    plan = make_plan(world, **layout, **keys, **batch_keys(world, layout, 2))
    found = run_ranks(world, traffic_of_a_step, plan)
    assert found[0].minimum > 0
    assert all(traffic.sent == traffic.reported == found[0].minimum == traffic.minimum for traffic in found)


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "stages"), [(2, False, 1), (2, True, 1), (1, False, 2)], ids=["alone", "shards", "mtp"]
)
def test_unified_replicas_do_not_wait_for_each_other(tp: int, sequence_parallel: bool, stages: int) -> None:
    """Nothing is sent where every rank has what it needs; shards, and stages for MTP, exchange inside their own."""
    layout = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": stages, "use_mimo": False}
    batch = {"global_batch_size": 16, "micro_batch_size": 2}
    plan = make_plan(4, **layout, sequence_parallel=sequence_parallel, **batch)
    replicas = [tuple(ranks) for ranks in plan.language.groups("tp", "pp")]
    assert len(replicas) == 2
    travels = sequence_parallel or stages > 1
    for rank, traffic in enumerate(run_ranks(4, traffic_of_a_step, plan)):
        assert traffic.sent == traffic.reported == traffic.minimum
        assert (traffic.sent > 0) == travels
        assert traffic.groups == {ranks for ranks in replicas if travels and rank in ranks}


def decoded_in_a_step(plan: ExperimentPlan, broken: bool) -> tuple[int, int]:
    """Files decoded by all ranks together in a step, and the images that the step has.

    Args:
        broken: every tensor parallel rank of a vision replica decodes all of the replica's images.
    """

    def read_alike(encode: Any, items: Any, vision: Grid) -> dict[int, tuple[int, ...]]:
        return {vision.rank(tp=tp, dp=d): own for d, own in enumerate(encode) for tp in range(vision.tp)}

    rule = read_alike if broken else macro_module.share_reads
    with mock.patch.object(macro_module, "share_reads", rule):
        pipeline = DataPipeline(plan, TRAIN, dist.get_rank())
        try:
            items = sum(len(macro.spec.items) for macro in pipeline.step(0))
            decoded = torch.tensor(pipeline.decoded)
        finally:
            pipeline.close()
    dist.all_reduce(decoded)
    return int(decoded), items


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples with 0 to 3 images, each a file of its own."""
    return helpers.write_mixture(tmp_path_factory.mktemp("mixture"), 24)


@pytest.mark.parametrize("vision", [Grid(dp=4), Grid(tp=2, dp=2), Grid(tp=4)], ids=str)
def test_each_image_is_decoded_once_in_the_job(source: Path, vision: Grid) -> None:
    """And the count shows it when the tensor parallel ranks of a replica read the same."""
    model = {"micro_batch_size": 2, "global_batch_size": 16, "train_iters": 1}
    config = helpers.make_config(source, model=model, prefetch=0)
    plan = helpers.make_plan(config, vision, Grid(tp=2, dp=2), (3, 1))
    for broken in (False, True):
        for decoded, items in run_ranks(4, decoded_in_a_step, plan, broken):
            assert items > 0
            assert decoded == items * (vision.tp if broken else 1)
