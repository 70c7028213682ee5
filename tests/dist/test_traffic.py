"""Nothing twice: bytes that really travel against the reported and the least, files decoded over all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flagscale.data import macro as macro_module
from flagscale.data.loader import TRAIN, DataPipeline
from flagscale.parallel import exchange as exchange_module
from flagscale.plan.layout import Grid
from flagscale.plan.plan import ExperimentPlan
from flagscale.train.step import TrainStep
from tests.data import helpers
from tests.dist.harness import build_state, loss_weights, macro_batches, make_plan
from tests.dist.pool import run_ranks
from tests.dist.test_gradients import LAYOUTS, MIXED, batch_keys


def bytes_of_a_step(plan: ExperimentPlan) -> tuple[int, int]:
    """Bytes that left their rank in the exchanges of a step, as counted at the collective and as reported."""
    state = build_state(plan)
    plain, sent = dist.all_to_all_single, torch.zeros((), dtype=torch.long)

    def counted(output: torch.Tensor, rows: torch.Tensor, receive: list[int], send: list[int], **more: Any) -> Any:
        own = dist.get_rank()
        sent.add_(sum(count for peer, count in enumerate(send) if peer != own) * rows.shape[1] * rows.itemsize)
        return plain(output, rows, receive, send, **more)

    try:
        with mock.patch.object(exchange_module.dist, "all_to_all_single", counted):
            report = TrainStep(state).accumulate(macro_batches(plan, MIXED, dist.get_rank()), loss_weights(plan, MIXED))
        dist.all_reduce(sent)
        return int(sent), report.exchange_bytes
    finally:
        state.topology.destroy()


@pytest.mark.parametrize("keys", [{}, {"freeze_vision": True, "freeze_merger": True}], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", ["vit_dp4-llm_tp2dp2-sp", "vit_dp4-llm_tp2pp2", "vit_tp2dp2-llm_dp4"])
def test_reported_bytes_are_those_that_travel(name: str, keys: dict[str, Any]) -> None:
    """That their number is the least possible is shown in `test_exchange.py`, row by row."""
    world, layout = LAYOUTS[name]
    plan = make_plan(world, **layout, **keys, **batch_keys(world, layout, 2), num_layers=4)
    counted = run_ranks(world, bytes_of_a_step, plan)
    assert counted[0][0] > 0
    assert counted == [(counted[0][0], counted[0][0])] * world


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
