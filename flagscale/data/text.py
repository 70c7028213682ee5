"""Samples as the tensors of a microbatch: rows of one padded sample each, or one row of packed samples.

Legend: B rows of a microbatch, S tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from flagscale.data.positions import rope_positions
from flagscale.data.sampler import NO_SAMPLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flagscale.data.chat import EncodedSample


TextSamples = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(sample_ids, lengths, num_tokens) of a `TextBatch`"""


@dataclass(frozen=True, slots=True)
class TextBatch:
    """One microbatch of one language replica: B padded rows of a sample each, or one row of packed samples.

    `input_ids_BS` int64; `labels_BS[:, i] == input_ids_BS[:, i + 1]` within a sample, the pad id after its last token;
    `loss_mask_BS` float32, 1.0 where token i + 1 is a target; `position_ids_3BS` int64 (time, height, width), from 0 in
    every sample, 0 on padding. `sample_ids` names the samples in order, `NO_SAMPLE` where a slot is empty or padding
    lies. `lengths` are the tokens of each when they are packed, padding at the end included; empty without packing.
    `num_tokens` are the tokens of each, 0 of `NO_SAMPLE`.
    """

    input_ids_BS: torch.Tensor
    labels_BS: torch.Tensor
    loss_mask_BS: torch.Tensor
    position_ids_3BS: torch.Tensor
    sample_ids: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    num_tokens: tuple[int, ...] = ()

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Its tensors, in the order of its fields."""
        return self.input_ids_BS, self.labels_BS, self.loss_mask_BS, self.position_ids_3BS

    @property
    def samples(self) -> TextSamples:
        """What is known of its samples, in the order of its fields."""
        return self.sample_ids, self.lengths, self.num_tokens

    @property
    def mtp_mask_BS(self) -> torch.Tensor:
        """Mask of multi-token prediction: position i predicts token i + 2, which position i + 1's mask speaks of."""
        mask_BS = torch.zeros_like(self.loss_mask_BS)
        mask_BS[:, :-1] = self.loss_mask_BS[:, 1:]
        last = -1
        for length in self.lengths:
            last += length
            mask_BS[0, last] = 0.0
        return mask_BS

    def spans(self) -> list[tuple[int, int, slice]]:
        """(sample id, row, tokens) of every sample."""
        if not self.lengths:
            whole = slice(0, self.input_ids_BS.shape[1])
            return [(sample, row, whole) for row, sample in enumerate(self.sample_ids) if sample != NO_SAMPLE]
        ends = list(accumulate(self.lengths))
        places = zip(self.sample_ids, self.lengths, ends, strict=True)
        return [(sample, 0, slice(end - length, end)) for sample, length, end in places if sample != NO_SAMPLE]

    def to(self, device: torch.device) -> TextBatch:
        """The same on another device; not copied where it lies there."""
        return TextBatch(*(tensor.to(device, non_blocking=True) for tensor in self.tensors), *self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowForm:
    """How rows are laid out.

    Attributes:
        length: S.
        packed: all samples in one row, or a row each.
        pad: token id of padding.
        merge_size: patches a side that make one visual token.
    """

    length: int
    packed: bool
    pad: int
    merge_size: int


def text_batch(sample_ids: Sequence[int], samples: Mapping[int, EncodedSample], form: RowForm) -> TextBatch:
    """The microbatch of these samples, in their order; `samples` holds all but `NO_SAMPLE`."""
    shape = (1 if form.packed else len(sample_ids), form.length)
    ids_BS, labels_BS = (np.full(shape, form.pad, dtype=np.int64) for _ in range(2))
    mask_BS = np.zeros(shape, dtype=np.float32)
    positions_3BS = np.zeros((3, *shape), dtype=np.int64)
    lengths, first = [], 0
    for slot, sample_id in enumerate(sample_ids):
        if sample_id == NO_SAMPLE:
            continue
        encoded = samples[sample_id]
        length, row = len(encoded.tokens_T), 0 if form.packed else slot
        last = first + length - 1
        ids_BS[row, first : last + 1] = encoded.tokens_T
        labels_BS[row, first:last] = encoded.tokens_T[1:]
        mask_BS[row, first:last] = encoded.is_target_T[1:]
        positions_3BS[:, row, first : last + 1] = rope_positions(length, encoded.placements, form.merge_size)
        if form.packed:
            lengths.append(length)
            first = last + 1
    padding = form.length - first if form.packed else 0
    num_tokens = (0 if sample_id == NO_SAMPLE else len(samples[sample_id].tokens_T) for sample_id in sample_ids)
    return TextBatch(
        input_ids_BS=torch.from_numpy(ids_BS),
        labels_BS=torch.from_numpy(labels_BS),
        loss_mask_BS=torch.from_numpy(mask_BS),
        position_ids_3BS=torch.from_numpy(positions_3BS),
        sample_ids=(*sample_ids, *[NO_SAMPLE] * bool(padding)),
        lengths=(*lengths, *[padding] * bool(padding)),
        num_tokens=(*num_tokens, *[0] * bool(padding)),
    )
