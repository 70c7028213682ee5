"""The language model's side of a macro batch: Megatron-Core's schedule over its microbatches, and the loss.

Loss of an iteration: sum of token losses / number of loss tokens in the *global batch*, for the language-model loss, plus
mtp_loss_scaling_factor times the same for multi-token prediction with its own count. Both counts are known from the index
before anything runs, so every microbatch is weighted right at once, whatever the grids and however uneven the ranks, and
gradients need no scaling afterwards: data parallel groups sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from flagscale.data.macro import TextBatch
from flagscale.models.qwen35.language import VisualRows


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWeights:
    """What one token's loss counts in the iteration's loss."""

    lm: float
    mtp: float

    @classmethod
    def of_batch(cls, *, num_loss_tokens: int, num_mtp_loss_tokens: int, mtp_loss_scaling_factor: float) -> LossWeights:
        """Weights for a global batch with these token counts; a batch without loss tokens has no loss."""
        return cls(
            lm=1.0 / num_loss_tokens if num_loss_tokens else 0.0,
            mtp=mtp_loss_scaling_factor / num_mtp_loss_tokens if num_mtp_loss_tokens else 0.0,
        )


def mtp_mask(loss_mask_BS: torch.Tensor) -> torch.Tensor:
    """Mask of multi-token prediction: position i predicts token i + 2, which position i + 1's mask speaks of."""
    mask_BS = torch.zeros_like(loss_mask_BS)
    mask_BS[:, :-1] = loss_mask_BS[:, 1:]
    return mask_BS


class LanguageSchedule:
    """Runs microbatches through the language model with Megatron-Core's schedules (PP = 1 and 1F1B).

    Args:
        model: the language model, wrapped for training where it trains.
        groups: its process groups.
        seq_length, micro_batch_size: shape of a microbatch.
    """

    def __init__(
        self, model: torch.nn.Module, groups: ProcessGroupCollection, *, seq_length: int, micro_batch_size: int
    ) -> None:
        self._model = model
        self._groups = groups
        self._shape = {"seq_length": seq_length, "micro_batch_size": micro_batch_size}
        self._run = get_forward_backward_func(pp_size=groups.pp.size(), vp_size=None)
        self._pipeline = {}
        if groups.pp.size() > 1:
            self._pipeline["p2p_communicator"] = P2PCommunicator(groups.pp, get_model_config(model))

    def train(self, batches: list[TextBatch], rows: list[VisualRows], weights: LossWeights) -> torch.Tensor:
        """Forward and backward of all microbatches; gradients accumulate in the model and in the rows' embeddings.

        Returns:
            [lm, mtp] token losses summed over the microbatches, zero on all but the last stage.
        """
        forward_step = partial(_training_forward, weights)
        losses = self._schedule(forward_step, batches, rows, forward_only=False)
        return torch.stack(losses).sum(0) if losses else torch.zeros(2, device=batches[0].input_ids_BS.device)

    def evaluate(self, batches: list[TextBatch], rows: list[VisualRows]) -> list[dict[str, torch.Tensor]]:
        """Forward only; per microbatch what `_evaluation_forward` collects, on the last stage; empty elsewhere."""
        return self._schedule(_evaluation_forward, batches, rows, forward_only=True)

    def _schedule(
        self, forward_step: Any, batches: list[TextBatch], rows: list[VisualRows], *, forward_only: bool
    ) -> list[Any]:
        return self._run(
            forward_step_func=forward_step,
            data_iterator=iter(zip(batches, rows, strict=True)),
            model=self._model,
            num_microbatches=len(batches),
            forward_only=forward_only,
            pg_collection=self._groups,
            **self._shape,
            **self._pipeline,
        )


Microbatches = Iterator[tuple[TextBatch, VisualRows]]


def _training_forward(weights: LossWeights, microbatches: Microbatches, model: torch.nn.Module) -> tuple[Any, Any]:
    batch, rows = next(microbatches)
    output = model(batch.input_ids_BS, batch.position_ids_3BS, batch.labels_BS, rows)
    return output, partial(_loss, batch.loss_mask_BS, weights)


def _loss(
    loss_mask_BS: torch.Tensor, weights: LossWeights, output: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The microbatch's share of the iteration's loss, a token count Megatron-Core asks for, and the loss sums."""
    lm_BS, mtp_BS = output
    lm = (lm_BS * loss_mask_BS).sum()
    mtp = (mtp_BS * mtp_mask(loss_mask_BS)).sum() if mtp_BS is not None else torch.zeros_like(lm)
    total = weights.lm * lm + weights.mtp * mtp
    return total, torch.zeros((), dtype=torch.int, device=lm.device), torch.stack([lm, mtp]).detach()


def _evaluation_forward(microbatches: Microbatches, model: torch.nn.Module) -> tuple[Any, Any]:
    batch, rows = next(microbatches)
    output = model(batch.input_ids_BS, batch.position_ids_3BS, batch.labels_BS, rows, with_predictions=True)
    return output, partial(_evaluation, batch.loss_mask_BS)


def _evaluation(
    loss_mask_BS: torch.Tensor, output: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    lm_BS, mtp_BS, predictions_BS = output
    sums = [(lm_BS * loss_mask_BS).sum()]
    sums.append((mtp_BS * mtp_mask(loss_mask_BS)).sum() if mtp_BS is not None else torch.zeros_like(sums[0]))
    collected = {"sums": torch.stack(sums), "predictions_BS": predictions_BS}
    return sums[0], torch.zeros((), dtype=torch.int, device=sums[0].device), collected
