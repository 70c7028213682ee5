"""Macro batches as plans: which samples, which visual items, who encodes and who reads them.

All but `MacroBatch` follows from the step, the index and the plan, so it is equal on every rank without communication;
a `MacroBatch` is what one rank then reads.

Legend: B rows of a microbatch, S tokens of a row, P patches of a visual item, D values of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from flagscale.data.assignment import VisualItem, assign, share_reads
from flagscale.data.packing import LENGTH_BUDGET, NONE, arrange, num_macro_batches
from flagscale.data.sampler import NO_SAMPLE
from flagscale.data.text import TextBatch, TextSamples
from flagscale.plan.params import patch_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from flagscale.data.chat import Placement
    from flagscale.plan.plan import ExperimentPlan


class Samples(Protocol):
    """What is known of samples before they are read; a `Corpus` has it."""

    def num_tokens(self, sample_id: int) -> int:
        """Length of a sample in tokens."""

    def placements(self, sample_id: int) -> tuple[Placement, ...]:
        """Visual items of a sample, in the order of their placeholders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MacroBatchSpec:
    """One macro batch: `num_microbatches` consecutive microbatches and the visual items of all their samples.

    Attributes:
        step: optimizer step, from 0.
        index: number of the macro batch in the step.
        is_last: whether it is the last one of its step.
        first_microbatch: number in the step of its first microbatch.
        num_microbatches: microbatches it holds; the last one of a step may hold fewer than the others.
        sample_ids: [microbatch][language replica][slot]; `NO_SAMPLE` for a slot that stays empty. Packed: all samples
            of the microbatch's one row, in order; there may be none.
        packed: whether a microbatch is one row of several samples.
        row_lengths: [microbatch][language replica] tokens of its rows (S).
        num_tokens: tokens of the samples, padding left out.
        num_computed: tokens that the language model computes.
        capacity: tokens that there is room for: seq_length a row that was filled, or what is computed.
        language_loads: cost of the samples of each language replica.
        items: `items[i].index == i`; `items[i].microbatch` counts within the macro batch.
        encode: for every vision dp coordinate the indexes of the items it encodes, in that order.
        reads: for every rank of the vision grid the indexes of the items whose files it decodes, ascending.
        loads: cost of `encode`, a number for every vision dp coordinate.
        patch_values: values of a patch (D).
    """

    step: int
    index: int
    is_last: bool
    first_microbatch: int
    num_microbatches: int
    sample_ids: tuple[tuple[tuple[int, ...], ...], ...]
    packed: bool
    row_lengths: tuple[tuple[int, ...], ...]
    num_tokens: int
    num_computed: int
    capacity: int
    language_loads: tuple[int, ...]
    items: tuple[VisualItem, ...]
    encode: tuple[tuple[int, ...], ...]
    reads: Mapping[int, tuple[int, ...]]
    loads: tuple[int, ...]
    patch_values: int

    @property
    def load_max_over_mean(self) -> float:
        """How uneven the encoder work is; 1.0 when even or when there is none."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0

    def sample_of(self, item: VisualItem) -> int:
        """Id of the sample that holds the item."""
        return item.sample


@dataclass(frozen=True, slots=True)
class MacroBatch:
    """A macro batch as this rank needs it.

    `microbatches` are those of this rank's language replica. `pixels[i]` float32 [P, D] are the patches, in merge-block
    order, of the items i in `spec.reads[rank]`, and of no others.
    """

    spec: MacroBatchSpec
    microbatches: tuple[TextBatch, ...]
    pixels: dict[int, torch.Tensor]

    def tensors(self) -> list[torch.Tensor]:
        """Those of the microbatches in their order, then the pixels."""
        return [one for batch in self.microbatches for one in batch.tensors] + list(self.pixels.values())

    @classmethod
    def of_tensors(
        cls, spec: MacroBatchSpec, samples: Sequence[TextSamples], items: Iterable[int], tensors: Iterable[torch.Tensor]
    ) -> MacroBatch:
        """The macro batch that has these tensors, in the order of `tensors()`.

        Args:
            samples: of every microbatch what is no tensor.
            items: visual items that the pixels are of.
        """
        rest = iter(tensors)
        texts = tuple(TextBatch(next(rest), next(rest), next(rest), next(rest), *own) for own in samples)
        return cls(spec, texts, dict(zip(items, rest, strict=True)))

    def pinned(self) -> MacroBatch:
        """The same in page-locked memory."""
        samples = [batch.samples for batch in self.microbatches]
        return MacroBatch.of_tensors(self.spec, samples, self.pixels, (one.pin_memory() for one in self.tensors()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Work of the two modules, in any unit each; whole numbers, so that every rank gets the same sums.

    Attributes:
        item: of encoding a visual item of grid (grid_h, grid_w).
        tokens: of the language model on a sample of so many tokens.
    """

    item: Callable[[int, int], int]
    tokens: Callable[[int], int]


def split_step(
    step: int, batch: Sequence[int], index: Samples, plan: ExperimentPlan, costs: Costs
) -> list[MacroBatchSpec]:
    """The macro batches of a step.

    Without packing and balancing, position p of the global batch goes to microbatch m, language replica d, slot b with
    p = m * (dp * micro_batch_size) + d * micro_batch_size + b; see `packing.py` for the rest.

    Args:
        batch: sample ids of the global batch, `NO_SAMPLE` for empty slots.
    """
    packed = plan.config.data.packing != NONE
    samples = _arranged(batch, plan)
    cost = lambda sample: costs.tokens(index.num_tokens(sample))  # noqa: E731
    specs, first = [], 0
    arrangements = arrange(samples, plan, index.num_tokens, cost)
    for number, bins in enumerate(arrangements):
        sample_ids = tuple(tuple(tuple(s for one in slots for s in one) for slots in replicas) for replicas in bins)
        row_lengths = _row_lengths(sample_ids, index, plan)
        items = tuple(_items(sample_ids, row_lengths, index, plan))
        item_costs = [costs.item(item.grid_h, item.grid_w) for item in items]
        ranks_per_node = plan.config.experiment.runner.nproc_per_node
        encode = assign(items, item_costs, plan.vision, plan.language, plan.vision_balance, ranks_per_node)
        filled = [[s for m in sample_ids for s in m[d] if s != NO_SAMPLE] for d in range(plan.language.dp)]
        num_rows = 1 if packed else plan.batch.micro_batch_size
        num_computed = num_rows * sum(map(sum, row_lengths))
        num_bins = sum(bool(one) for replicas in bins for slots in replicas for one in slots)
        budget = plan.config.data.packing == LENGTH_BUDGET
        specs.append(
            MacroBatchSpec(
                step=step,
                index=number,
                is_last=bins is arrangements[-1],
                first_microbatch=first,
                num_microbatches=len(bins),
                sample_ids=sample_ids,
                packed=packed,
                row_lengths=row_lengths,
                num_tokens=sum(index.num_tokens(sample) for own in filled for sample in own),
                num_computed=num_computed,
                capacity=num_bins * plan.config.model.seq_length if budget else num_computed,
                language_loads=tuple(sum(map(cost, own)) for own in filled),
                items=items,
                encode=encode,
                reads=share_reads(encode, items, plan.vision),
                loads=tuple(sum(item_costs[i] for i in share) for share in encode),
                patch_values=patch_values(plan.config.model),
            )
        )
        first += len(bins)
    return specs


def count_macro_batches(batch: Sequence[int], index: Samples, plan: ExperimentPlan) -> int:
    """How many macro batches `split_step` makes, without the work of planning them."""
    return num_macro_batches(_arranged(batch, plan), plan, index.num_tokens)


def _arranged(batch: Sequence[int], plan: ExperimentPlan) -> Sequence[int]:
    """The samples that get places: empty slots have some only where rows are not packed."""
    return batch if plan.config.data.packing == NONE else [sample for sample in batch if sample != NO_SAMPLE]


def _row_lengths(
    sample_ids: Sequence[Sequence[Sequence[int]]], index: Samples, plan: ExperimentPlan
) -> tuple[tuple[int, ...], ...]:
    """Tokens of the rows of every microbatch and replica.

    Packed rows are as long as their samples, up to a multiple of what sequence parallelism divides them by. Pipeline
    stages are told the shape once a macro batch, so there the rows of a replica are as long as its longest.
    """
    model = plan.config.model
    if plan.config.data.packing == NONE:
        return ((model.seq_length,) * plan.language.dp,) * len(sample_ids)
    multiple = plan.language.tp if model.sequence_parallel else 1
    lengths = [
        [max(1, -(-sum(index.num_tokens(s) for s in own) // multiple)) * multiple for own in replicas]
        for replicas in sample_ids
    ]
    if plan.language.pp > 1:
        longest = [max(column) for column in zip(*lengths, strict=True)]
        lengths = [longest] * len(lengths)
    return tuple(map(tuple, lengths))


def _items(
    sample_ids: Sequence[Sequence[Sequence[int]]],
    row_lengths: Sequence[Sequence[int]],
    index: Samples,
    plan: ExperimentPlan,
) -> list[VisualItem]:
    """Visual items of the samples, in the order microbatch, replica, slot, placeholder."""
    packed, merge_size = plan.config.data.packing != NONE, plan.config.model.vision_spatial_merge_size
    items: list[VisualItem] = []
    for m, replicas in enumerate(sample_ids):
        for d, slots in enumerate(replicas):
            first = 0
            for b, sample_id in enumerate(slots):
                for placement in index.placements(sample_id) if sample_id != NO_SAMPLE else ():
                    items.append(
                        VisualItem(
                            index=len(items),
                            microbatch=m,
                            replica=d,
                            slot=0 if packed else b,
                            start=first + placement.start,
                            grid_h=placement.grid_h,
                            grid_w=placement.grid_w,
                            num_tokens=placement.num_tokens(merge_size),
                            media=placement.media,
                            frame=placement.frame,
                            sample=sample_id,
                            row_length=row_lengths[m][d] if packed else None,
                        )
                    )
                first += index.num_tokens(sample_id) if packed else 0
    return items
