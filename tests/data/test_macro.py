"""What the plan of a packed step says of its padding: the numbers that metrics.jsonl reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagscale.data.chat import Placement
from flagscale.data.macro import Costs, MacroBatchSpec, split_step
from flagscale.plan.layout import Grid
from tests.data.helpers import make_config, make_plan
from tests.pure.test_data_packing import log_normal

BATCH, REPLICAS, SEQ_LENGTH = 256, 4, 4096


class Lengths:
    """Samples of text only, of known lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def num_tokens(self, sample_id: int) -> int:
        return self._lengths[sample_id]

    def placements(self, sample_id: int) -> tuple[Placement, ...]:
        return ()


def specs_of(packing: str, lengths: list[int]) -> list[MacroBatchSpec]:
    model = {"global_batch_size": BATCH, "micro_batch_size": 2, "seq_length": SEQ_LENGTH}
    config = make_config(Path("unused"), model=model, packing=packing, language_balance=packing != "none")
    plan = make_plan(config, Grid(dp=REPLICAS), Grid(dp=REPLICAS), (8,) * (BATCH // 2 // REPLICAS // 8))
    costs = Costs(item=lambda h, w: h * w, tokens=lambda n: n * (SEQ_LENGTH + n))
    return split_step(0, range(BATCH), Lengths(lengths), plan, costs)


@pytest.mark.parametrize(
    ("packing", "padding", "efficiency"), [("none", 0.8, 0.1), ("in_batch", 0.0, 1.0), ("length_budget", 0.0, 0.95)]
)
def test_padding_and_packing_efficiency_of_a_log_normal_mix(packing: str, padding: float, efficiency: float) -> None:
    """`length_budget` fills at least 95 % of the rows that it computes; unpacked rows are mostly padding."""
    for seed in range(5):
        specs = specs_of(packing, log_normal(BATCH, seed, SEQ_LENGTH))
        num_tokens = sum(spec.num_tokens for spec in specs)
        assert num_tokens == sum(log_normal(BATCH, seed, SEQ_LENGTH))
        share = 1 - num_tokens / sum(spec.num_computed for spec in specs)
        found = num_tokens / sum(spec.capacity for spec in specs)
        assert padding <= share <= padding + 0.1
        assert efficiency <= found <= 1
