"""The measurement of the encoder beside the language model runs, and trains nothing of the encoder."""

from __future__ import annotations

import pytest

from flagscale.plan.layout import VISION
from flagscale.platforms import get_platform
from flagscale.train.step import TrainStep
from tests.dist.harness import Samples, build_state, loss_weights, macro_batches, make_plan
from tests.dist.pool import run_ranks
from tools.bench.beside import Seconds, measure

SAMPLES = Samples(seed=3)


def measured() -> tuple[Seconds, float]:
    """What a rank measures, and the sum of the encoder's gradients afterwards."""
    plan = make_plan(1, global_batch_size=4, micro_batch_size=1, vision_micro_batch_size=2)
    state = build_state(plan)
    current, following = macro_batches(plan, SAMPLES, 0)
    found = measure(TrainStep(state), (current, following), loss_weights(plan, SAMPLES), get_platform("cpu"))
    gradients = sum(float(p.main_grad.abs().sum()) for p in state.wrapped[VISION].parameters())
    state.topology.destroy()
    return found, gradients


def test_both_are_timed_alone_and_at_once() -> None:
    found, gradients = run_ranks(1, measured)[0]
    assert min(found.encoder, found.language, found.both) > 0
    assert gradients == 0


def test_what_is_hidden_is_a_share_of_the_encoder() -> None:
    found = Seconds(encoder=0.2, language=1.0, both=1.15)
    assert found.hidden == pytest.approx(0.25)
    assert str(found).endswith("25% of the encoder hidden")
