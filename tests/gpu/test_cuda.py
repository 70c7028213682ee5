"""The GPU's kernels against the CPU's, a graph against eager launches, and a macro batch without host waits."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flagscale.train.build import TrainState, build
from flagscale.train.step import TrainStep
from tests.dist.harness import loss_weights, macro_batches
from tests.gpu import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the CPU path computes in fp32."""
    target = tmp_path_factory.mktemp("reference") / "cpu.pt"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "tests.gpu.reference", str(target)], cwd=root, check=True, timeout=300)
    return torch.load(target)


@pytest.fixture(scope="module")
def platform() -> Iterator[Any]:
    """This process on its GPU, a world of its own."""
    yield reference.start("cuda")
    dist.destroy_process_group()


def state_of(platform: Any, expected: dict[str, Any], **keys: Any) -> TrainState:
    """A training state with the reference's weights and these system keys."""
    state = build(reference.make_reference_plan(**keys), platform)
    reference.load_weights(state, expected["weights"])
    return state


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_bf16_gradients_are_near_the_cpu(platform: Any, expected: dict[str, Any], cuda_graph: bool) -> None:
    """bf16 keeps 8 bits: after all layers a gradient is off by several percent whatever computes it. Bounded by what
    the CPU's bf16 path is off by: by 1.25 times that in the same parameter, and less than that in the median, since the
    CPU rounds more often. A wrong kernel is off by 1."""
    state = state_of(platform, expected, bf16=True, cuda_graph=cuda_graph)
    try:
        sums, gradients = reference.step(state)
        assert sums == pytest.approx(expected["sums"], rel=1e-2)
        found, on_cpu = reference.errors(gradients, expected["gradients"]), expected["bf16_errors"]
        wrong = {name: (error, on_cpu[name]) for name, error in found.items() if not error < 1.25 * on_cpu[name]}
        assert not wrong, wrong
        assert statistics.median(error / on_cpu[name] for name, error in found.items()) < 1
    finally:
        state.topology.destroy()


def test_a_graph_equals_eager_launches(platform: Any, expected: dict[str, Any]) -> None:
    """The same kernels in the same order, so that only atomics may differ."""
    results = []
    for cuda_graph in (False, True):
        state = state_of(platform, expected, bf16=True, cuda_graph=cuda_graph)
        results.append(reference.step(state))
        state.topology.destroy()
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-4)
    wrong = {name: error for name, error in reference.errors(results[1][1], results[0][1]).items() if not error < 5e-3}
    assert not wrong, wrong


PLAIN = {"gradient_accumulation_fusion": False, "overlap_grad_reduce": False, "overlap_param_gather": False}
STEPS = {"gradient_accumulation_fusion": 0, "overlap_grad_reduce": 2, "overlap_param_gather": 2}


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("key", PLAIN)
def test_what_saves_time_changes_nothing(
    platform: Any, expected: dict[str, Any], key: str, cuda_graph: bool
) -> None:  # fmt: skip
    """One of these on, and none. Overlaps act from the second step on. Fusion leaves out the rounding of a bf16 weight
    gradient, up to 2^-9 of it; Adam's first steps move a weight by the sign of its gradient, so that where it is near
    zero rounding would turn the step over, and gradients are compared at the same weights."""
    results = []
    for keys in (PLAIN, PLAIN | {key: True, "ddp_bucket_size": 100_000}):
        state = state_of(platform, expected, bf16=True, cuda_graph=cuda_graph, **keys)
        step = TrainStep(state)
        for n in range(STEPS[key]):
            weights = loss_weights(state.plan, reference.SAMPLES, n)
            step.run(macro_batches(state.plan, reference.SAMPLES, 0, n), weights)
        state.finish_gathers()
        results.append(reference.step(state))
        state.topology.destroy()
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-3)
    bound = 2e-2 if STEPS[key] else 5e-3
    wrong = {name: error for name, error in reference.errors(results[1][1], results[0][1]).items() if not error < bound}
    assert not wrong, wrong


def test_a_macro_batch_does_not_wait_for_the_gpu(platform: Any, expected: dict[str, Any]) -> None:
    """After the first iteration no call between reading a batch and the optimizer synchronises."""
    state = state_of(platform, expected, bf16=True, cuda_graph=True)
    try:
        step, weights = TrainStep(state), loss_weights(state.plan, reference.SAMPLES)
        step.run(macro_batches(state.plan, reference.SAMPLES, 0), weights)
        batches = macro_batches(state.plan, reference.SAMPLES, 0, 1)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step.accumulate(batches, loss_weights(state.plan, reference.SAMPLES, 1))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    finally:
        state.topology.destroy()
