"""One training iteration, flat: every stage of the colocated schedule in order.

Unified runs the same code: equal grids, and macro batches of one microbatch (with pipeline stages, one macro batch an
iteration, encoded by the first stage's ranks).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads

from flagscale.data.macro import MacroBatch
from flagscale.data.text import TextBatch
from flagscale.models.qwen35.build import extra_tp_sum_params
from flagscale.models.qwen35.language import VisualRows
from flagscale.parallel.exchange import Exchange
from flagscale.parallel.routes import Consumer
from flagscale.plan.layout import LANGUAGE, VISION
from flagscale.train.build import TrainState, trainable_modules
from flagscale.train.clock import PhaseClock
from flagscale.train.language import LanguageSchedule, LossWeights
from flagscale.train.optimizer import StepOutcome
from flagscale.train.overlap import start_gather
from flagscale.train.vision import MacroEncoder, gather_pixels


@dataclass(kw_only=True, slots=True)
class StepReport:
    """What an iteration did, the same on every rank except `phase_s` and `host_s`.

    Attributes:
        loss_sums: [lm, mtp] token losses summed: of this rank before the optimizer step, of the world after it.
        balance_sum: balancing losses of experts, not weighted, summed over samples and layers; ranks as for loss_sums.
        exchange_bytes: embeddings and gradients that left their rank, over the whole job.
        loads: cost encoded by each vision replica.
        language_loads: cost of the samples of each language replica.
        num_tokens, num_computed, capacity: as in `MacroBatchSpec`, over the step.
        phase_s: seconds this rank spent in each phase; on a GPU the optimizer's are those of the iteration before.
        host_s: on a GPU, seconds the host spent launching each phase.
    """

    loss_sums: torch.Tensor | None = None
    balance_sum: torch.Tensor | None = None
    outcome: StepOutcome | None = None
    num_items: int = 0
    exchange_bytes: int = 0
    loads: list[float] = field(default_factory=list)
    language_loads: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_computed: int = 0
    capacity: int = 0
    phase_s: dict[str, float] = field(default_factory=dict)
    host_s: dict[str, float] = field(default_factory=dict)

    def count(self, macro: MacroBatch, exchange_bytes: int) -> None:
        """Adds one macro batch."""
        self.num_items += len(macro.spec.items)
        self.exchange_bytes += exchange_bytes
        self.loads = _added(self.loads, macro.spec.loads)
        self.language_loads = _added(self.language_loads, macro.spec.language_loads)
        self.num_tokens += macro.spec.num_tokens
        self.num_computed += macro.spec.num_computed
        self.capacity += macro.spec.capacity


class TrainStep:
    """Runs iterations on the modules of a `TrainState`."""

    def __init__(self, state: TrainState) -> None:
        model = state.plan.config.model
        self._state = state
        self._device = state.platform.device
        self._consumer = Consumer(
            seq_length=model.seq_length, sequence_parallel=model.sequence_parallel, mtp=model.mtp_num_layers > 0
        )
        self._exchange_group = state.topology.exchange_group(state.plan.vision_balance)
        self.language = LanguageSchedule(
            state.modules[LANGUAGE],
            state.topology.groups[LANGUAGE],
            graph_tokens=_graph_tokens(state),
        )
        self._trains_vision = VISION in trainable_modules(model)
        self._encoder = MacroEncoder(
            state.modules.get(VISION, torch.nn.Identity()),
            width=model.hidden_size,
            dtype=state.dtype,
            trainable=self._trains_vision,
            recompute=model.vision_recompute,
        )
        self._patch_values = 3 * model.vision_temporal_patch_size * model.vision_patch_size**2
        self._clock = PhaseClock(self._device, state.place.enter)

    def run(self, macro_batches: Iterable[MacroBatch], weights: LossWeights) -> StepReport:
        """One optimizer step over the macro batches of a global batch. Collective over the world."""
        report = self.accumulate(macro_batches, weights)
        with self._clock.phase("optimizer"):
            report.outcome = self._state.optimizer.step(torch.cat([report.loss_sums, report.balance_sum[None]]))
            if not report.outcome.skipped:
                start_gather(self._state.wrapped.values())
                self._state.scheduler.step(increment=1)
        *losses, balance = report.outcome.sums
        report.loss_sums, report.balance_sum = torch.tensor(losses), torch.tensor(balance)
        report.phase_s, report.host_s = self._clock.seconds(), self._clock.host_seconds()
        return report

    def accumulate(self, macro_batches: Iterable[MacroBatch], weights: LossWeights) -> StepReport:
        """Complete gradients of a global batch in every module, from zero. Collective over the world."""
        state, model = self._state, self._state.plan.config.model
        for module in state.wrapped.values():
            module.zero_grad_buffer()
        state.optimizer.zero_grad()
        report = StepReport()
        sums = torch.zeros(2, device=self._device)

        for macro in macro_batches:
            # Encode the images of all microbatches once, and send the embeddings to where they are used.
            exchange, rows = self.encode(macro)
            # Every microbatch through the language model; gradients collect in the rows' embeddings.
            with self._clock.phase("language"):
                sums += self.language.train(self.on_device(macro), rows, weights, is_last=macro.spec.is_last)
            # The gradients back to where the embeddings were made, and the encoder's backward, once.
            if self._trains_vision:
                with self._clock.phase("exchange"):
                    grads_VD = exchange.send_gradients(_collect_gradients(rows))
                with self._clock.phase("vision_backward"):
                    self._encoder.backward(grads_VD, is_last=macro.spec.is_last)
            moved = exchange.travelling_rows(backward=self._trains_vision)
            report.count(macro, moved * model.hidden_size * state.dtype.itemsize)

        # Reduce the gradients of each module over its own grid.
        with self._clock.phase("reduce"):
            finalize_gradients(state)
        report.loss_sums = sums if self._counts_loss() else torch.zeros_like(sums)
        report.balance_sum = self.language.take_balance()
        return report

    def encode(self, macro: MacroBatch) -> tuple[Exchange, list[VisualRows]]:
        """Vision forward of a macro batch and the exchange; per microbatch the rows its language model needs here."""
        state, spec = self._state, macro.spec
        with self._clock.phase("vision_forward"):
            rows_VD = self._encode_own_items(macro)
        with self._clock.phase("exchange"):
            exchange = Exchange(
                spec.items,
                spec.encode,
                vision=state.plan.modules[VISION],
                language=state.plan.modules[LANGUAGE],
                consumer=self._consumer,
                rank=state.topology.rank,
                micro_batch_size=1 if spec.packed else state.plan.config.model.micro_batch_size,
                group=self._exchange_group,
            )
            rows_RD = exchange.send_embeddings(rows_VD)
        needs_grad = self._trains_vision and torch.is_grad_enabled()
        rows = []
        for m in range(spec.num_microbatches):
            rows_MD = rows_RD[exchange.microbatch_slice(m)].detach().requires_grad_(needs_grad)
            rows.append(exchange.visual_rows(rows_MD, m))
        return exchange, rows

    def on_device(self, macro: MacroBatch) -> list[TextBatch]:
        """The macro batch's texts on this rank's device."""
        return [batch.to(self._device) for batch in macro.microbatches]

    def _encode_own_items(self, macro: MacroBatch) -> torch.Tensor:
        """rows_VD of the items assigned to this rank's vision replica; none outside the vision grid."""
        topology, spec = self._state.topology, macro.spec
        if not topology.has(VISION):
            width = self._state.plan.config.model.hidden_size
            return torch.zeros((0, width), dtype=self._state.dtype, device=self._device)
        items = [spec.items[index] for index in spec.encode[topology.coordinate(VISION)["dp"]]]
        readers = {index: rank for rank, indexes in spec.reads.items() for index in indexes}
        pixels_PC = gather_pixels(
            macro.pixels, items, readers, topology.groups[VISION].tp, self._device, self._patch_values
        )
        return self._encoder.forward(pixels_PC, items, spec.num_microbatches)

    def _counts_loss(self) -> bool:
        """Whether this rank's loss sums count: one of the tensor parallel ranks, which all have the same."""
        return self._state.topology.coordinate(LANGUAGE)["tp"] == 0


def _graph_tokens(state: TrainState) -> int | None:
    """Tokens of a microbatch that can be replayed as one CUDA graph: padded ones, which all have one shape.

    With experts there is none: how many tokens each gets is read back from the device.
    """
    config = state.plan.config
    wanted = state.platform.is_cuda and config.system.cuda_graph
    if not wanted or config.model.num_experts or config.data.packing != "none":
        return None
    return config.model.seq_length * config.model.micro_batch_size


def _added(totals: list[float], values: Sequence[float]) -> list[float]:
    """Sums element by element; no totals yet count as zeros."""
    return [total + value for total, value in zip(totals or [0] * len(values), values, strict=True)]


def finalize_gradients(state: TrainState) -> None:
    """Completes the gradients of every module: data parallel sum, tied embeddings, tensor parallel partial sums."""
    for name, module in state.wrapped.items():
        finalize_model_grads([module], None, pg_collection=state.topology.groups[name])
        for parameter in extra_tp_sum_params(module):
            dist.all_reduce(parameter.main_grad, group=state.topology.groups[name].tp)


def _collect_gradients(rows: list[VisualRows]) -> torch.Tensor:
    """grads_RD of all received rows; zero where no microbatch's loss reached them."""
    gradients = [
        row.embeddings_VD.grad if row.embeddings_VD.grad is not None else torch.zeros_like(row.embeddings_VD)
        for row in rows
    ]
    return torch.cat(gradients)
