"""Moves visual embeddings from the ranks that encoded them to the ranks that use them, and their gradients back.

One ragged all-to-all each way, among the ranks that may have something for each other, and none where nobody has. Both
ends derive the split sizes from the routes (`routes.py`), so nothing is negotiated.

Legend of shapes: V rows made by this rank, R rows received by it, D width of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from flagscale.data.assignment import VisualItem
from flagscale.models.qwen35.language import VisualRows
from flagscale.parallel.routes import (
    Consumer,
    Route,
    backward_routes,
    forward_routes,
    needed_rows,
    sequence_shard,
    travelling_rows,
)
from flagscale.plan.layout import Grid
from flagscale.platforms.transfer import to_device

RowsOf = dict[int, int]  # item index -> offset of its row 0 in a buffer (negative where leading rows are absent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """One direction of the exchange as this rank sees it: local rows in both orders, and rows per peer."""

    send_rows: np.ndarray
    send_counts: list[int]
    receive_rows: np.ndarray
    receive_counts: list[int]
    num_rows_out: int  # rows in the buffer that is filled
    anything: bool  # whether a row leaves any of the peers; the same on all of them

    @classmethod
    def build(
        cls, routes: Sequence[Route], rank: int, peers: Sequence[int], held: RowsOf, filled: RowsOf, size: int
    ) -> Traffic:
        """Args:
        routes: of the whole job, the same on every rank.
        peers: ranks among which this rank's rows travel, itself included.
        held: offsets of the items' rows in the buffer sent from.
        filled: offsets of the items' rows in the buffer received into, which has `size` rows.
        """
        sends: dict[int, list[np.ndarray]] = {peer: [] for peer in peers}
        receives: dict[int, list[np.ndarray]] = {peer: [] for peer in peers}
        for route in routes:
            rows = np.arange(route.first_row, route.first_row + route.num_rows)
            if route.source == rank:
                sends[route.target].append(held[route.item] + rows)
            if route.target == rank:
                receives[route.source].append(filled[route.item] + rows)
        return cls(
            send_rows=_join(sends),
            send_counts=[sum(map(len, parts)) for parts in sends.values()],
            receive_rows=_join(receives),
            receive_counts=[sum(map(len, parts)) for parts in receives.values()],
            num_rows_out=size,
            anything=any(route.source != route.target and route.source in sends for route in routes),
        )


def _join(peers: dict[int, list[np.ndarray]]) -> np.ndarray:
    parts = [rows for peer in peers.values() for rows in peer]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


class Exchange:
    """The exchange of one macro batch on one rank.

    Args:
        items: every visual item of the macro batch.
        encode: per vision replica, the items it encodes, in order.
        vision, language: the grids.
        consumer: what the language model needs.
        rank: this rank.
        micro_batch_size: rows of a microbatch (B).
        group: the ranks among which this rank's rows travel; see `Topology.exchange_group`.
    """

    def __init__(
        self, items: Sequence[VisualItem], encode: Sequence[Sequence[int]], *, vision: Grid, language: Grid,
        consumer: Consumer, rank: int, micro_batch_size: int, group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        self._items = items
        self._language = language
        self._consumer = consumer
        self._coordinate = language.coordinate(rank)
        self._micro_batch_size = micro_batch_size
        self._group = group
        peers = dist.get_process_group_ranks(group)
        forward = forward_routes(items, encode, vision, language, consumer)
        backward = backward_routes(items, encode, vision, language, consumer)
        made, num_made = self._made_rows(encode, vision, rank)
        self._received, self._slices, num_received = self._received_rows(forward, rank)
        self._forward = Traffic.build(forward, rank, peers, made, self._received, num_received)
        self._backward = Traffic.build(backward, rank, peers, self._received, made, num_made)
        self._travelling_rows = travelling_rows(forward), travelling_rows(backward)

    def send_embeddings(self, rows_VD: torch.Tensor) -> torch.Tensor:
        """rows_VD -> rows_RD. Collective over the group where anything travels; a rank without rows takes part."""
        return _all_to_all(rows_VD, self._forward, self._group)

    def send_gradients(self, grads_RD: torch.Tensor) -> torch.Tensor:
        """grads_RD -> grads_VD, summed over the ranks that used a row: the adjoint of `send_embeddings`."""
        return _all_to_all(grads_RD, self._backward, self._group)

    def travelling_rows(self, *, backward: bool) -> int:
        """Rows that leave their rank over the whole job: the embeddings and, with `backward`, their gradients."""
        there, back = self._travelling_rows
        return there + back if backward else there

    def microbatch_slice(self, microbatch: int) -> slice:
        """The received rows (of R) that belong to one microbatch of the macro batch; they lie together."""
        return self._slices.get(microbatch, slice(0, 0))

    def visual_rows(self, rows_MD: torch.Tensor, microbatch: int) -> VisualRows:
        """Where this rank's language model puts the rows of one microbatch, `rows_RD[microbatch_slice(microbatch)]`."""
        first_row = self.microbatch_slice(microbatch).start
        tp, pp = self._coordinate["tp"], self._coordinate["pp"]
        decoder: list[tuple[np.ndarray, np.ndarray]] = []
        mtp: list[tuple[np.ndarray, np.ndarray]] = []
        for index, offset in self._received.items():
            item = self._items[index]
            if item.microbatch != microbatch:
                continue
            low, high = sequence_shard(self._language, self._consumer, tp, item.row_length)
            rows = np.arange(*needed_rows(item, self._language, self._consumer, tp, pp))
            positions = item.start + rows
            for uses, active, shift in (
                (decoder, pp == 0, 0),
                (mtp, self._consumer.mtp and pp == self._language.pp - 1, 1),
            ):
                inside = (positions - shift >= low) & (positions - shift < high)
                if active:
                    flat = (positions[inside] - shift - low) * self._micro_batch_size + item.slot
                    uses.append((offset - first_row + rows[inside], flat))
        tensors = [_index(part, rows_MD.device) for uses in (decoder, mtp) for part in _columns(uses)]
        return VisualRows(rows_MD, *tensors)

    def _made_rows(self, encode: Sequence[Sequence[int]], vision: Grid, rank: int) -> tuple[RowsOf, int]:
        offsets, size = {}, 0
        if rank in vision:
            for index in encode[vision.coordinate(rank)["dp"]]:
                offsets[index] = size
                size += self._items[index].num_tokens
        return offsets, size

    def _received_rows(self, routes: Sequence[Route], rank: int) -> tuple[RowsOf, dict[int, slice], int]:
        offsets: RowsOf = {}
        slices: dict[int, slice] = {}
        size = 0
        mine = [route for route in routes if route.target == rank]
        for route in sorted(mine, key=lambda route: self._items[route.item].microbatch):
            offsets[route.item] = size - route.first_row
            microbatch = self._items[route.item].microbatch
            start = slices[microbatch].start if microbatch in slices else size
            size += route.num_rows
            slices[microbatch] = slice(start, size)
        return offsets, slices, size


def _columns(uses: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if not uses:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    return np.concatenate([source for source, _ in uses]), np.concatenate([target for _, target in uses])


def _index(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return to_device(torch.from_numpy(values.astype(np.int64, copy=False)), device)


def _all_to_all(rows: torch.Tensor, traffic: Traffic, group: dist.ProcessGroup) -> torch.Tensor:
    """Sends rows per `traffic` and adds what arrives into a zeroed buffer, in a fixed order."""
    width = rows.shape[1]
    outgoing = rows.index_select(0, _index(traffic.send_rows, rows.device))
    incoming = outgoing
    if traffic.anything:
        incoming = rows.new_empty((len(traffic.receive_rows), width))
        dist.all_to_all_single(incoming, outgoing, traffic.receive_counts, traffic.send_counts, group=group)
    filled = rows.new_zeros((traffic.num_rows_out, width))
    return filled.index_add_(0, _index(traffic.receive_rows, rows.device), incoming)
