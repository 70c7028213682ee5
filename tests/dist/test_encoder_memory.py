"""What the encoder keeps for its delayed backward."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flagscale.plan.plan import ExperimentPlan
from flagscale.train.step import TrainStep
from tests.dist.harness import Samples, build_state, full_gradients, loss_weights, macro_batches, make_plan
from tests.dist.pool import run_ranks
from tests.dist.test_gradients import compare

FACTORS = (1, 8)
SAMPLES = Samples(seed=5, images=(1, 2, 3))


@dataclass
class _Packed:
    tensor: torch.Tensor


class SavedBytes:
    """Bytes of distinct tensors that autograd keeps for backward passes: now, and at most so far.

    Of a view, such as a piece's pixels out of the macro batch's, its own bytes count and not those of its storage.
    """

    def __init__(self) -> None:
        self.now = self.most = 0
        self._held: dict[tuple[int, int], int] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """Counts a tensor until autograd drops it; one that is kept twice counts once."""
        if isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
            return tensor  # weights are there in any case
        packed, size = _Packed(tensor), tensor.numel() * tensor.itemsize
        key = (tensor.data_ptr(), size)
        if self._held.setdefault(key, 0) == 0:
            self.now += size
            self.most = max(self.most, self.now)
        self._held[key] += 1
        weakref.finalize(packed, self._drop, key, size)
        return packed

    def unpack(self, packed: Any) -> torch.Tensor:
        """What was packed."""
        return packed.tensor if isinstance(packed, _Packed) else packed

    def _drop(self, key: tuple[int, int], size: int) -> None:
        self._held[key] -= 1
        if self._held[key] == 0:
            self.now -= size


def encoder_bytes(plan: ExperimentPlan) -> tuple[int, dict[str, torch.Tensor]]:
    """The most that the encoder's graphs keep in a step on any rank, and the gradients on rank 0."""
    state = build_state(plan)
    try:
        step, saved = TrainStep(state), SavedBytes()
        encoder = step._encoder._encoder

        def counted(*args: Any) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                return encoder(*args)

        step._encoder._encoder = counted
        step.accumulate(macro_batches(plan, SAMPLES, dist.get_rank()), loss_weights(plan, SAMPLES))
        assert saved.now == 0, "a graph outlives its step"
        most = torch.tensor(saved.most)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most), full_gradients(state)
    finally:
        state.topology.destroy()


def measured(recompute: bool, factor: int, **keys: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """`encoder_bytes` at ViT DP4, LLM TP2/DP2 with 8 microbatches."""
    plan = make_plan(
        4, tensor_model_parallel_size=2, global_batch_size=32, micro_batch_size=2,
        vision_micro_batch_size=factor, vision_recompute=recompute, **keys,
    )  # fmt: skip
    assert plan.batch.vit_batch_factor == factor
    return run_ranks(4, encoder_bytes, plan, timeout=120)[0]


def test_recompute_keeps_memory_flat_and_gradients_equal() -> None:
    kept = {factor: measured(False, factor) for factor in FACTORS}
    recomputed = {factor: measured(True, factor) for factor in FACTORS}
    assert recomputed[8][0] <= 1.15 * recomputed[1][0]
    assert kept[8][0] > 3 * kept[1][0], "negative control: without recomputation memory grows with the factor"
    for factor in FACTORS:
        compare(recomputed[factor][1], kept[1][1], f"factor {factor}")


@pytest.mark.parametrize("recompute", [False, True])
def test_a_frozen_encoder_keeps_no_graph(recompute: bool) -> None:
    bytes_kept, gradients = measured(recompute, 1, freeze_vision=True, freeze_merger=True)
    assert bytes_kept == 0
    assert gradients
    assert not any(name.startswith("model.visual") for name in gradients)


def test_a_frozen_encoder_under_a_trained_merger_keeps_nothing_of_its_layers() -> None:
    """The bytes are those of the merger, however deep the encoder is; trained, they grow with its depth."""
    frozen, trained = (
        [measured(False, 1, freeze_vision=freeze, vision_num_layers=layers)[0] for layers in (1, 3)]
        for freeze in (True, False)
    )
    assert 0 < frozen[0] == frozen[1]
    assert trained[0] > frozen[0]
    assert trained[1] > 1.5 * trained[0], "negative control"
