"""The language model's side of a macro batch: Megatron-Core's schedule over its microbatches, and the loss.

Loss of an iteration: sum of token losses / number of loss tokens in the *global batch*, for the language-model loss,
plus mtp_loss_scaling_factor times the same for multi-token prediction with its own count. Both counts are known from
the index before anything runs, so every microbatch is weighted right at once, whatever the grids and however uneven the
ranks, and gradients need no scaling afterwards: data parallel groups sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch.profiler import record_function

from flagscale.data.text import TextBatch
from flagscale.models.qwen35.attention import PackedSequences
from flagscale.models.qwen35.language import VisualRows
from flagscale.models.qwen35.weights import unwrap
from flagscale.platforms.transfer import to_device
from flagscale.train.graphs import MicrobatchGraph
from flagscale.train.overlap import finish_gather, held_back, reduces_early
from flagscale.train.timeline import MARK, MICROBATCH


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

    def tensor(self, device: torch.device) -> torch.Tensor:
        """[lm, mtp] on a device."""
        return to_device(torch.tensor([self.lm, self.mtp]), device)


class LanguageSchedule:
    """Runs microbatches through the language model with Megatron-Core's schedules (PP = 1 and 1F1B).

    Args:
        model: the language model, wrapped for training where it trains.
        groups: its process groups.
        graph_tokens: tokens of a microbatch whose shape never changes, to be replayed as one CUDA graph; None: no
            graph. Without effect with pipeline stages.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        groups: ProcessGroupCollection,
        *,
        graph_tokens: int | None,
    ) -> None:
        self._model = model
        self._groups = groups
        self._run = get_forward_backward_func(pp_size=groups.pp.size(), vp_size=None)
        self._pipeline = {}
        if groups.pp.size() > 1:
            self._pipeline["p2p_communicator"] = P2PCommunicator(groups.pp, get_model_config(model))
        self._graph: MicrobatchGraph | None = None
        if graph_tokens is not None and groups.pp.size() == 1:
            shards = groups.tp.size() if get_model_config(model).sequence_parallel else 1
            self._graph = MicrobatchGraph(self._loss_of, self._without_trace, graph_tokens // shards)

    @property
    def is_graphed(self) -> bool:
        """Whether a microbatch is replayed as one CUDA graph."""
        return self._graph is not None

    def train(
        self, batches: list[TextBatch], rows: list[VisualRows], weights: LossWeights, *, is_last: bool = True
    ) -> torch.Tensor:
        """Forward and backward of all microbatches; gradients accumulate in the model and in the rows' embeddings.

        Args:
            is_last: whether the model's gradients are complete afterwards, and may be reduced.

        Returns:
            [lm, mtp] token losses summed over the microbatches, zero on all but the last stage.
        """
        finish_gather(self._model)
        weights_2 = weights.tensor(batches[0].input_ids_BS.device)
        if self._graph is not None:
            with held_back(self._model):
                losses = [self._graph.run(batch, row, weights_2) for batch, row in zip(batches, rows, strict=True)]
            if is_last and reduces_early(self._model):
                self._model.start_grad_sync()  # replayed backward passes call no hooks
        else:
            # The schedule reduces with its last microbatch, unless no microbatch of it is the step's last.
            get_model_config(self._model).no_sync_func = partial(held_back, self._model) if is_last else None
            with held_back(self._model, unless=is_last):
                losses = self._schedule(partial(_training_forward, weights_2), batches, rows, forward_only=False)
        return torch.stack(losses).sum(0) if losses else torch.zeros(2, device=batches[0].input_ids_BS.device)

    def take_balance(self) -> torch.Tensor:
        """As `LanguageModel.take_balance`."""
        return unwrap(self._model).take_balance()

    def evaluate(self, batches: list[TextBatch], rows: list[VisualRows]) -> list[dict[str, torch.Tensor]]:
        """Forward only; per microbatch what `_evaluation_forward` collects, on the last stage; empty elsewhere."""
        finish_gather(self._model)
        return self._schedule(_evaluation_forward, batches, rows, forward_only=True)

    def _loss_of(self, batch: TextBatch, rows: VisualRows, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and loss sums of one microbatch, for the graph."""
        output, loss = _training_forward(weights, iter([(batch, rows)]), self._model)
        total, _, sums = loss(output)
        return total, sums

    def _without_trace(self, run: Callable[[], None]) -> None:
        """Runs before any gradient of the iteration exists, and forgets the gradients it leaves."""
        run()
        if isinstance(self._model, DistributedDataParallel):
            # Not `zero_grad_buffer`, after which the capture would start reductions again.
            for buffer in (*self._model.buffers, *self._model.expert_parallel_buffers):
                buffer.reset()

    def _schedule(
        self, forward_step: Any, batches: list[TextBatch], rows: list[VisualRows], *, forward_only: bool
    ) -> list[Any]:
        # Pipeline stages are told one shape: packed rows of a macro batch are equally long there.
        micro_batch_size, seq_length = batches[0].input_ids_BS.shape
        return self._run(
            forward_step_func=forward_step,
            data_iterator=iter(zip(batches, rows, strict=True)),
            model=self._model,
            num_microbatches=len(batches),
            forward_only=forward_only,
            pg_collection=self._groups,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            **self._pipeline,
        )


Microbatches = Iterator[tuple[TextBatch, VisualRows]]


def _training_forward(weights: torch.Tensor, microbatches: Microbatches, model: torch.nn.Module) -> tuple[Any, Any]:
    batch, rows = next(microbatches)
    with record_function(MARK + MICROBATCH):
        output = model(
            batch.input_ids_BS,
            batch.position_ids_3BS,
            batch.labels_BS,
            rows,
            _packed(batch),
            num_tokens=batch.num_tokens,
        )
    return output, partial(_loss, batch, weights)


def _packed(batch: TextBatch) -> PackedSequences | None:
    return PackedSequences.of(list(batch.lengths), batch.input_ids_BS.device) if batch.lengths else None


def _loss(
    batch: TextBatch, weights: torch.Tensor, output: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The microbatch's share of the iteration's loss, a token count Megatron-Core asks for, and the loss sums."""
    lm_BS, mtp_BS = output
    lm = (lm_BS * batch.loss_mask_BS).sum()
    mtp = (mtp_BS * batch.mtp_mask_BS).sum() if mtp_BS is not None else torch.zeros_like(lm)
    sums = torch.stack([lm, mtp])
    return (weights * sums).sum(), torch.zeros((), dtype=torch.int, device=lm.device), sums.detach()


def _evaluation_forward(microbatches: Microbatches, model: torch.nn.Module) -> tuple[Any, Any]:
    batch, rows = next(microbatches)
    output = model(
        batch.input_ids_BS, batch.position_ids_3BS, batch.labels_BS, rows, _packed(batch), with_predictions=True
    )
    return output, partial(_evaluation, batch)


def _evaluation(
    batch: TextBatch, output: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    lm_BS, mtp_BS, predictions_BS = output
    sums = [(lm_BS * batch.loss_mask_BS).sum()]
    sums.append((mtp_BS * batch.mtp_mask_BS).sum() if mtp_BS is not None else torch.zeros_like(sums[0]))
    collected = {"sums": torch.stack(sums), "predictions_BS": predictions_BS}
    return sums[0], torch.zeros((), dtype=torch.int, device=sums[0].device), collected
