"""Losses of the first 20 iterations of a small main job, as they were when last looked at.

A change here means that the numbers of every run change: say why in the commit, and write them anew with
`python -m tests.dist.test_golden`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from flagscale.train.metrics import read_metrics
from tests.data.helpers import small_digits
from tests.dist.pool import run_ranks, shared_pool
from tests.dist.test_training import plan_of, train

GOLDEN = Path(__file__).parents[1] / "golden" / "losses.json"
ITERATIONS = 20
KEYS = ("lm_loss", "mtp_1_loss", "grad_norm", "grad_norm_vision", "grad_norm_language")
RELATIVE = 1e-4  # processors differ in the order of sums, and twenty updates pass the differences on


def measure(folder: Path) -> list[dict[str, float]]:
    """The first iterations of the small main job on four ranks."""
    keys = ("model.num_layers=4", "model.full_attention_interval=4")
    plan = plan_of(small_digits(), folder / "run", f"model.train_iters={ITERATIONS}", *keys)
    run_ranks(4, train, plan, timeout=300)
    return [{key: line[key] for key in KEYS} for line in read_metrics(folder / "run") if "lm_loss" in line]


def test_the_first_losses_are_the_recorded_ones(tmp_path: Path) -> None:
    found, recorded = measure(tmp_path), json.loads(GOLDEN.read_text())
    assert len(found) == len(recorded) == ITERATIONS
    for iteration, (values, expected) in enumerate(zip(found, recorded, strict=True), start=1):
        assert values == pytest.approx(expected, rel=RELATIVE), f"iteration {iteration}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        lines = ",\n".join(json.dumps(values) for values in measure(Path(scratch)))
    GOLDEN.write_text(f"[\n{lines}\n]\n")
    shared_pool().end()
