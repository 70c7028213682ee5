"""Macro batches as tensors: what one rank needs of each, read ahead in the background.

Legend: P patches of a visual item, D values of a patch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flagscale.config.mix import Points
from flagscale.data.corpus import TRAIN, Corpus, split_sources
from flagscale.data.macro import Costs, MacroBatch, MacroBatchSpec, count_macro_batches, split_step
from flagscale.data.mix import MixSampler
from flagscale.data.prefetch import Prefetcher
from flagscale.data.sampler import NO_SAMPLE, SequentialSampler
from flagscale.data.text import RowForm, text_batch
from flagscale.data.workers import Key, Parcels, WorkerReader
from flagscale.plan.flops import language_training_flops, vision_item_flops, vision_item_training_flops

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from flagscale.data.index_build import BadSample
    from flagscale.plan.plan import ExperimentPlan


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A sample with one image, for people: its file or bytes, and what is asked about it."""

    image: Path | bytes
    question: str


class DataPipeline:
    """The macro batches of a split, for one rank; a function of the step and, where sources are mixed, of what has been
    drawn before, apart from what is read ahead.

    Args:
        plan: the experiment.
        split: `TRAIN` (shuffled, `train_iters` global batches over as many epochs as that takes) or `VALID` (in file
            order, each sample once, the last global batch filled with empty slots).
        rank: world rank.
        pin: put tensors into page-locked memory, from which a GPU copies without making the host wait.

    Attributes:
        corpus: the split's samples.
        num_batches: global batches there are; `step` takes 0 .. num_batches - 1.
        wait_s: seconds that `step` has waited for data, in all.

    Raises:
        UserError: when the data cannot be used.
    """

    def __init__(self, plan: ExperimentPlan, split: str, rank: int, *, pin: bool = False) -> None:
        config, model = plan.config, plan.config.model
        self._plan = plan
        self._rank = rank
        self._pin = pin
        self._replica = plan.language.coordinate(rank)["dp"]
        self.corpus = Corpus.open(config, split)
        self._costs = Costs(item=_item_cost(plan), tokens=_token_cost(plan))
        self._sampler: MixSampler | SequentialSampler
        if split == TRAIN:
            self._sampler = MixSampler(
                names=self.corpus.names,
                sizes=self.corpus.sizes,
                weights=tuple(spec.weight for spec in split_sources(config, split)),
                global_batch_size=model.global_batch_size,
                seed=model.seed,
            )
            self.num_batches = model.train_iters
        else:
            self._sampler = SequentialSampler(
                num_samples=len(self.corpus), global_batch_size=model.global_batch_size
            )
            self.num_batches = self._sampler.num_batches
        # A validation usually ends after eval_iters: what it does not ask for is not read ahead.
        self._pause = self.num_batches if split == TRAIN else min(model.eval_iters, self.num_batches)
        self._prefetcher: Prefetcher[MacroBatch] | WorkerReader | None = None
        self._next = (-1, 0)  # (step, macro batch) that the prefetcher hands out next
        self._end = 0  # the step that it does not read any more
        self._decoded_elsewhere = 0
        self.wait_s = 0.0

    @property
    def decoded(self) -> int:
        """Images and frames this rank has decoded, those read ahead included; of workers, those that have arrived."""
        return self.corpus.decoded + self._decoded_elsewhere

    def sample_ids(self, step: int) -> list[int]:
        """Sample ids of the global batch, in batch order; `NO_SAMPLE` for empty slots."""
        return self._sampler.sample_ids(step)

    def num_samples(self, step: int) -> int:
        """Samples of the global batch."""
        return len(self._filled(step))

    def num_tokens(self, step: int) -> int:
        """Tokens of the global batch, padding left out."""
        return sum(self.corpus.num_tokens(i) for i in self._filled(step))

    def num_loss_tokens(self, step: int) -> int:
        """Targets of the language loss in the global batch."""
        return self.corpus.num_loss_tokens(self._filled(step))

    def num_mtp_loss_tokens(self, step: int) -> int:
        """Targets of the multi-token-prediction loss in the global batch."""
        return self.corpus.num_mtp_loss_tokens(self._filled(step))

    def source_metrics(self, step: int) -> dict[str, float]:
        """Weight, samples and tokens of every source in the global batch, by metric name; empty for a single source."""
        if len(self.corpus.names) == 1:
            return {}
        assert isinstance(self._sampler, MixSampler), "only training mixes sources"
        values: dict[str, float] = {}
        ids = self._filled(step)
        for number, (name, share) in enumerate(zip(self.corpus.names, self._sampler.shares(step), strict=True)):
            own = [i for i in ids if self.corpus.source_of(i) == number]
            values[f"weight/{name}"] = share
            values[f"samples/{name}"] = len(own)
            values[f"tokens/{name}"] = sum(map(self.corpus.num_tokens, own))
        return values

    def change_mix(self, step: int, weights: Mapping[str, Points]) -> None:
        """Draw with these weights from `step` on. What was read ahead of it is dropped."""
        assert isinstance(self._sampler, MixSampler), "only training mixes sources"
        self.close()
        self._sampler.change(step, weights)

    def first_empty_mix(self, step: int, weights: Mapping[str, Points]) -> int | None:
        """The first step from which on such a change would leave nothing to draw from; None when there is none."""
        assert isinstance(self._sampler, MixSampler), "only training mixes sources"
        return self._sampler.first_empty_step(step, weights)

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a checkpoint needs so that reading goes on at `step`: a few numbers a source."""
        assert isinstance(self._sampler, MixSampler), "only training is resumed"
        return self._sampler.state_dict(step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, at any number of ranks and any layout."""
        assert isinstance(self._sampler, MixSampler), "only training is resumed"
        self.close()
        self._sampler.load_state_dict(state)

    def bad_samples(self) -> list[BadSample]:
        """The samples of the sources that were left out."""
        return self.corpus.bad_samples()

    def _filled(self, step: int) -> list[int]:
        return [i for i in self._sampler.sample_ids(step) if i != NO_SAMPLE]

    def flops(self, step: int) -> float:
        """Model FLOPs of forward and backward of the global batch: its images as they are, its texts as they are when
        packed, and padded to seq_length else."""
        model, ids = self._plan.config.model, self._filled(step)
        grids = [(item.grid_h, item.grid_w) for i in ids for item in self.corpus.placements(i)]
        visual = sum(vision_item_training_flops(model, *grid) for grid in grids)
        if self._plan.config.data.packing == "none":
            return visual + language_training_flops(model, model.global_batch_size, model.seq_length)
        return visual + sum(language_training_flops(model, 1, self.corpus.num_tokens(i)) for i in ids)

    def specs(self, step: int) -> list[MacroBatchSpec]:
        """The macro batches of a step, equal on every rank."""
        return split_step(step, self._sampler.sample_ids(step), self.corpus, self._plan, self._costs)

    def step(self, step: int) -> Iterator[MacroBatch]:
        """The macro batches of a step with this rank's tensors.

        Steps in a row are read ahead across their border; any other step starts the reading anew.

        Raises:
            UserError: when a sample cannot be read.
            RuntimeError: when a process that reads ahead has ended.
            IndexError: when there is no such step.
        """
        if not 0 <= step < self.num_batches:
            raise IndexError(f"step {step} is outside 0..{self.num_batches - 1}")
        if self._plan.config.data.prefetch == 0:
            yield from self._timed(self._read_steps(step, step + 1))
            return
        if self._prefetcher is None or self._next != (step, 0) or step == self._pause:
            self._prefetcher = self._restart(step)
        prefetcher, number, last = self._prefetcher, 0, False
        while not last:
            assert self._next == (step, number), f"{self._next} is read, not {(step, number)}: finish a step first"
            start = time.perf_counter()
            macro = prefetcher.get()
            self.wait_s += time.perf_counter() - start
            number, last = number + 1, macro.spec.is_last
            self._next = (step + 1, 0) if last else (step, number)
            yield macro
        if self._next == (self._end, 0):
            self.close()  # processes without work cost memory

    def _timed(self, batches: Iterator[MacroBatch]) -> Iterator[MacroBatch]:
        """The same batches, the time spent on each added to `wait_s`."""
        while True:
            start = time.perf_counter()
            macro = next(batches, None)
            self.wait_s += time.perf_counter() - start
            if macro is None:
                return
            yield macro

    def _restart(self, step: int) -> Prefetcher[MacroBatch] | WorkerReader:
        """Read ahead from `step` on."""
        self.close()
        self._end = self._pause if step < self._pause else self.num_batches
        self._next = (step, 0)
        data = self._plan.config.data
        if data.workers == 0:
            return Prefetcher(self._read_steps(step, self._end), data.prefetch)
        return WorkerReader(
            Parcels(self.specs, self._read, lambda: self.corpus.decoded),
            self._keys(step, self._end),
            workers=data.workers,
            prefetch=data.prefetch,
            pin=self._pin,
            on_decoded=self._note_decoded,
        )

    def _note_decoded(self, count: int) -> None:
        self._decoded_elsewhere += count

    def _keys(self, first: int, end: int) -> Iterator[Key]:
        """All macro batches of steps, by step and number."""
        for step in range(first, end):
            count = count_macro_batches(self._sampler.sample_ids(step), self.corpus, self._plan)
            yield from ((step, number) for number in range(count))

    def _read_steps(self, first: int, end: int) -> Iterator[MacroBatch]:
        """All macro batches of steps, pinned where that is asked for."""
        for step in range(first, end):
            for spec in self.specs(step):
                macro = self._read(spec)
                yield macro.pinned() if self._pin else macro

    def _read(self, spec: MacroBatchSpec) -> MacroBatch:
        """This rank's part of a macro batch, in pageable memory."""
        texts = []
        for replicas, lengths in zip(spec.sample_ids, spec.row_lengths, strict=True):
            ids = replicas[self._replica]
            encoded = {i: self.corpus.read(i).encoded for i in ids if i != NO_SAMPLE}
            length, pad, merge_size = lengths[self._replica], self.corpus.pad, self.corpus.merge_size
            form = RowForm(length=length, packed=spec.packed, pad=pad, merge_size=merge_size)
            texts.append(text_batch(ids, encoded, form))
        reads = spec.reads.get(self._rank, ())
        pixels: dict[int, torch.Tensor] = {}
        for sample_id in dict.fromkeys(spec.items[i].sample for i in reads):
            own = [spec.items[i] for i in reads if spec.items[i].sample == sample_id]
            wanted = [(item.media, item.frame, (item.grid_h, item.grid_w)) for item in own]
            found = self.corpus.pixels(sample_id, self.corpus.record(sample_id), wanted)
            pixels.update((item.index, torch.from_numpy(patches)) for item, patches in zip(own, found, strict=True))
        return MacroBatch(spec, tuple(texts), {i: pixels[i] for i in reads})

    def shown(self, sample_id: int) -> ShownSample | None:
        """The sample for people; None unless it has one image and one question about it."""
        record = self.corpus.record(sample_id)
        questions = [turn for turn in record.turns if turn.role == "user"]
        if [media.kind for media in record.media] != ["image"] or len(questions) != 1:
            return None
        question = " ".join(part for part in questions[0].parts if isinstance(part, str))
        return ShownSample(self.corpus.shown(sample_id, record), question)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.corpus.indexes[0].source.tokenizer.decode(token_ids)

    def close(self) -> None:
        """End the thread or the processes that read ahead; the pipeline can be used again."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None


def _item_cost(plan: ExperimentPlan) -> Any:
    """Work of encoding an item: FLOPs of the vision encoder."""
    return lru_cache(maxsize=4096)(lambda grid_h, grid_w: int(vision_item_flops(plan.config.model, grid_h, grid_w)))


def _token_cost(plan: ExperimentPlan) -> Any:
    """Work of a sample: FLOPs of the language model, multi-token prediction included."""
    return lru_cache(maxsize=65536)(lambda tokens: int(language_training_flops(plan.config.model, 1, tokens)))
