"""One CUDA graph for a whole microbatch of the language model: forward, loss and backward.

At tensor parallel sizes above 1 a microbatch of a 4B model is a few thousand kernels of tens of microseconds, and the
host cannot launch them as fast as the GPU runs them (380 ms against 236 ms measured on H200, docs/log.md). A graph is
one launch. It needs fixed shapes: texts are padded to seq_length anyway, and visual rows are padded here to the largest
number that a microbatch can hold. Gradients accumulate in the same buffers as without a graph.

Legend of shapes: N = S_local * B rows of the text embedding, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch.profiler import record_function

from flagscale.data.text import TextBatch
from flagscale.models.qwen35.language import VisualRows
from flagscale.train.timeline import MARK, MICROBATCH

HOST_FIELDS = ("sample_ids", "lengths", "num_tokens")  # of a TextBatch: no tensors
WARM_UP = 3  # eager runs before the capture: autotuning, workspaces and communicators have to exist

MicrobatchLoss = Callable[[TextBatch, VisualRows, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    """The graph's own input tensors."""

    batch: TextBatch
    rows: VisualRows
    weights: torch.Tensor


class MicrobatchGraph:
    """Captures a microbatch at its first use and replays it afterwards. Every rank has to use it alike.

    Args:
        loss: (texts, visual rows, loss weights) -> (loss to differentiate, sums to report).
        reset: undoes what the warm-up runs added to gradient buffers, given a function that runs them.
        num_rows: N.
    """

    def __init__(self, loss: MicrobatchLoss, reset: Callable[[Callable[[], None]], None], num_rows: int) -> None:
        self._loss = loss
        self._reset = reset
        self._num_rows = num_rows
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: _Inputs | None = None
        self._sums: torch.Tensor | None = None

    def run(self, batch: TextBatch, rows: VisualRows, weights: torch.Tensor) -> torch.Tensor:
        """Forward and backward of one microbatch; the gradient of the rows' embeddings goes to their `.grad`.

        Returns:
            The sums that `loss` reports; valid until the next call.
        """
        if self._inputs is None:
            self._inputs = self._allocate(batch, rows, weights)
        with record_function(MARK + MICROBATCH):  # a replay leaves no marks of what was captured
            self._fill(batch, rows, weights)
            if self._graph is None:
                self._capture()
            self._graph.replay()
        if rows.embeddings_VD.requires_grad:
            rows.embeddings_VD.grad = self._inputs.rows.embeddings_VD.grad[: len(rows.embeddings_VD)].clone()
        return self._sums.clone()

    def _allocate(self, batch: TextBatch, rows: VisualRows, weights: torch.Tensor) -> _Inputs:
        device, width = rows.embeddings_VD.device, rows.embeddings_VD.shape[1]
        embeddings = torch.zeros(self._num_rows, width, dtype=rows.embeddings_VD.dtype, device=device)
        embeddings.requires_grad_(rows.embeddings_VD.requires_grad)
        indexes = [torch.zeros(self._num_rows, dtype=torch.long, device=device) for _ in range(4)]
        texts = [getattr(batch, f.name) for f in fields(batch) if f.name not in HOST_FIELDS]
        return _Inputs(
            batch=TextBatch(*(torch.empty_like(tensor, device=device) for tensor in texts), ()),
            rows=VisualRows(embeddings, *indexes),
            weights=weights.clone(),
        )

    @torch.no_grad()
    def _fill(self, batch: TextBatch, rows: VisualRows, weights: torch.Tensor) -> None:
        """Copies a microbatch into the graph's inputs and pads the visual rows; a padding row is dropped."""
        own = self._inputs
        for f in fields(batch):
            if f.name not in HOST_FIELDS:
                getattr(own.batch, f.name).copy_(getattr(batch, f.name), non_blocking=True)
        own.weights.copy_(weights, non_blocking=True)
        count = len(rows.embeddings_VD)
        assert count <= self._num_rows, f"{count} visual rows in a microbatch of {self._num_rows} tokens"
        own.rows.embeddings_VD[:count].copy_(rows.embeddings_VD)
        if own.rows.embeddings_VD.grad is not None:
            own.rows.embeddings_VD.grad.zero_()
        for use in ("decoder", "mtp"):
            source, target = (getattr(rows, f"{use}_{end}") for end in ("source", "target"))
            own_source, own_target = (getattr(own.rows, f"{use}_{end}") for end in ("source", "target"))
            # Padding reads every row once, so that the backward's additions do not pile up on one.
            torch.arange(self._num_rows, out=own_source)
            own_source[: len(source)].copy_(source)
            own_target.fill_(self._num_rows)
            own_target[: len(target)].copy_(target)

    def _backward(self) -> None:
        loss, self._sums = self._loss(self._inputs.batch, self._inputs.rows, self._inputs.weights)
        loss.backward()

    def _capture(self) -> None:
        """Warms up and captures, on the stream that is current, which must not be the default one."""
        embeddings = self._inputs.rows.embeddings_VD

        def warm_up() -> None:
            for _ in range(WARM_UP):
                self._backward()

        self._reset(warm_up)
        torch.cuda.synchronize()
        if embeddings.grad is not None:
            embeddings.grad.zero_()
        self._graph = torch.cuda.CUDAGraph()
        # Other threads read data and pin memory meanwhile; only this thread's calls have to be capturable.
        with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self._backward()
        torch.cuda.synchronize()
