"""Samples packed into one row equal the same samples run one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flagscale.platforms.torch_kernels import causal_conv1d
from tests.dist.pool import run_ranks
from tests.models.ranks import full_step
from tests.models.tiny import Batch, Piece, make_batch, random_weights, tiny_model

SAMPLES: list[list[Piece]] = [[5, (4, 6), 7], [70], [3, (2, 2), 4], [1], [(2, 4), 67]]


def packed_batch(batches: list[Batch]) -> tuple[Batch, list[int]]:
    """The batches' single samples in one row, and their lengths."""
    lengths = [batch.input_ids_BS.shape[1] for batch in batches]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(Batch):
        values = [getattr(batch, field.name) for batch in batches]
        if field.name.endswith("S"):
            fields[field.name] = torch.cat(values, dim=-1)
        elif field.name == "row_of_V":
            fields[field.name] = torch.cat([rows + start for rows, start in zip(values, starts[:-1], strict=True)])
        elif field.name == "grid_hw":
            fields[field.name] = [grid for grids in values for grid in grids]
        else:
            fields[field.name] = torch.cat(values)
    return Batch(**fields), lengths


@pytest.mark.parametrize(
    "layout", [{"tp": 1, "pp": 1, "vtp": 1}, {"tp": 2, "pp": 1, "vtp": 1}, {"tp": 1, "pp": 2, "vtp": 1}]
)
def test_packed_equals_one_by_one(layout: dict[str, int]) -> None:
    """Losses and gradients, 1e-5 relative; sequences longer and shorter than a chunk, and of one token."""
    model = tiny_model(sequence_parallel=layout["tp"] > 1)
    weights = random_weights(model)
    batches = [make_batch(model, [sample]) for sample in SAMPLES]
    single_layout = {"tp": 1, "pp": 1, "vtp": 1}
    single_model = dataclasses.replace(model, sequence_parallel=False)
    single = [run_ranks(1, full_step, single_model, weights, batch, single_layout)[0] for batch in batches]
    batch, lengths = packed_batch(batches)
    assert sum(lengths) % 2 == 0
    ranks = layout["tp"] * layout["pp"]
    results = run_ranks(ranks, full_step, model, weights, batch, layout, True, lengths)
    lm_BS, mtp_BS = results[-1]["losses"]
    for mine, key, mask in ((lm_BS, 0, batch.loss_mask_BS), (mtp_BS, 1, batch.mtp_mask_BS)):
        alone = torch.cat([result["losses"][key] for result in single], dim=1)
        assert ((mine - alone) / alone * mask).abs().max() <= 1e-5
    for name in {name for result in results for name in result["gradients"]}:
        parts = [results[stage * layout["tp"]]["gradients"] for stage in range(layout["pp"])]
        shared = parts[:1] if name.startswith("model.visual.") else parts
        mine = sum(part[name] for part in shared if name in part)
        alone = sum(result["gradients"][name] for result in single)
        limit = 1e-4 if name.endswith(("A_log", "dt_bias")) else 1e-5
        assert (mine - alone).norm() <= limit * alone.norm(), (name, float((mine - alone).norm() / alone.norm()))


@pytest.mark.parametrize("lengths", [[1], [2], [1, 1], [3, 1, 5]])
def test_rows_may_be_shorter_than_the_convolution(lengths: list[int]) -> None:
    """A replica without samples computes a row of a single padding token."""
    generator = torch.Generator().manual_seed(1)
    x_BTD, weight = torch.randn(1, sum(lengths), 6, generator=generator), torch.randn(6, 4, generator=generator)
    borders = torch.tensor([0, *lengths]).cumsum(0)
    packed, _ = causal_conv1d(x_BTD, weight, cu_seqlens=borders)
    alone = [causal_conv1d(part, weight)[0] for part in x_BTD.split(lengths, dim=1)]
    assert torch.allclose(packed, torch.cat(alone, dim=1), atol=1e-6)
