"""Macro batches as plans: which samples, which visual items, who encodes and who reads them.

All but `MacroBatch` follows from the step, the index and the plan, so it is equal on every rank without communication;
a `MacroBatch` is what one rank then reads.

Legend: B samples of a microbatch, S seq_length, P patches of a visual item, D values of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flagscale.data.assignment import VisualItem, assign, share_reads
from flagscale.data.sampler import NO_SAMPLE
from flagscale.plan.params import patch_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from flagscale.data.index import SampleIndex
    from flagscale.plan.plan import ExperimentPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class MacroBatchSpec:
    """One macro batch: `num_microbatches` consecutive microbatches and the visual items of all their samples.

    Attributes:
        step: optimizer step, from 0.
        index: number of the macro batch in the step.
        first_microbatch: number in the step of its first microbatch.
        num_microbatches: microbatches it holds; the last one of a step may hold fewer than the others.
        sample_ids: [microbatch][language replica][slot]; `NO_SAMPLE` for a slot that stays empty.
        items: `items[i].index == i`; `items[i].microbatch` counts within the macro batch.
        encode: for every vision dp coordinate the indexes of the items it encodes, in that order.
        reads: for every rank of the vision grid the indexes of the items whose files it decodes, ascending.
        loads: cost of `encode`, a number for every vision dp coordinate.
        patch_values: values of a patch (D).
    """

    step: int
    index: int
    first_microbatch: int
    num_microbatches: int
    sample_ids: tuple[tuple[tuple[int, ...], ...], ...]
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
        return self.sample_ids[item.microbatch][item.replica][item.slot]


@dataclass(frozen=True, slots=True)
class TextBatch:
    """One microbatch of one language replica, padded to S.

    `input_ids_BS` int64; `labels_BS[:, i] == input_ids_BS[:, i + 1]`, the pad id in the last column; `loss_mask_BS`
    float32, 1.0 where token i + 1 is a target; `position_ids_3BS` int64 (time, height, width), 0 on padding.
    `sample_ids` has `NO_SAMPLE` where a slot is empty: only padding, no target.
    """

    input_ids_BS: torch.Tensor
    labels_BS: torch.Tensor
    loss_mask_BS: torch.Tensor
    position_ids_3BS: torch.Tensor
    sample_ids: tuple[int, ...]

    def to(self, device: torch.device) -> TextBatch:
        """The same on another device; not copied where it lies there."""
        tensors = (self.input_ids_BS, self.labels_BS, self.loss_mask_BS, self.position_ids_3BS)
        return TextBatch(*(tensor.to(device, non_blocking=True) for tensor in tensors), self.sample_ids)


@dataclass(frozen=True, slots=True)
class MacroBatch:
    """A macro batch as this rank needs it.

    `microbatches` are those of this rank's language replica. `pixels[i]` float32 [P, D] are the patches, in merge-block
    order, of the items i in `spec.reads[rank]`, and of no others.
    """

    spec: MacroBatchSpec
    microbatches: tuple[TextBatch, ...]
    pixels: dict[int, torch.Tensor]


def split_step(
    step: int, batch: Sequence[int], index: SampleIndex, plan: ExperimentPlan, cost: Callable[[int, int], int]
) -> list[MacroBatchSpec]:
    """The macro batches of a step.

    Position p of the global batch goes to microbatch m, language replica d, slot b with
    p = m * (dp * micro_batch_size) + d * micro_batch_size + b.

    Args:
        batch: sample ids of the global batch.
        cost: work of encoding an item of grid (grid_h, grid_w), a whole number.
    """
    specs, first = [], 0
    for number, num_microbatches in enumerate(plan.batch.macro_batches):
        sample_ids = tuple(_microbatch(batch, m, plan) for m in range(first, first + num_microbatches))
        items = tuple(_items(sample_ids, index, plan.config.model.vision_spatial_merge_size))
        costs = [cost(item.grid_h, item.grid_w) for item in items]
        ranks_per_node = plan.config.experiment.runner.nproc_per_node
        encode = assign(items, costs, plan.vision, plan.language, plan.vision_balance, ranks_per_node)
        specs.append(
            MacroBatchSpec(
                step=step,
                index=number,
                first_microbatch=first,
                num_microbatches=num_microbatches,
                sample_ids=sample_ids,
                items=items,
                encode=encode,
                reads=share_reads(encode, items, plan.vision),
                loads=tuple(sum(costs[i] for i in share) for share in encode),
                patch_values=patch_values(plan.config.model),
            )
        )
        first += num_microbatches
    assert first == plan.batch.num_microbatches, f"macro batches hold {first} microbatches, not {plan.batch}"
    return specs


def _microbatch(batch: Sequence[int], m: int, plan: ExperimentPlan) -> tuple[tuple[int, ...], ...]:
    """Sample ids of microbatch m: [language replica][slot]."""
    size, replicas = plan.batch.micro_batch_size, plan.language.dp
    starts = [(m * replicas + d) * size for d in range(replicas)]
    return tuple(tuple(batch[start : start + size]) for start in starts)


def _items(sample_ids: Sequence[Sequence[Sequence[int]]], index: SampleIndex, merge_size: int) -> list[VisualItem]:
    """Visual items of the samples, in the order microbatch, replica, slot, placeholder."""
    items: list[VisualItem] = []
    for m, replicas in enumerate(sample_ids):
        for d, slots in enumerate(replicas):
            for b, sample_id in enumerate(slots):
                if sample_id == NO_SAMPLE:
                    continue
                for placement in index.placements(sample_id):
                    items.append(
                        VisualItem(
                            index=len(items),
                            microbatch=m,
                            replica=d,
                            slot=b,
                            start=placement.start,
                            grid_h=placement.grid_h,
                            grid_w=placement.grid_w,
                            num_tokens=placement.num_tokens(merge_size),
                            media=placement.media,
                            frame=placement.frame,
                        )
                    )
    return items
