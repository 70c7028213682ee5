"""Macro batches as tensors: what one rank needs of each, read ahead in the background.

Legend: B samples of a microbatch, S seq_length, P patches of a visual item, D values of a patch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from flagscale.data.image import ImageReader, ImageSettings
from flagscale.data.index import SampleIndex, Source
from flagscale.data.macro import MacroBatch, MacroBatchSpec, TextBatch, split_step
from flagscale.data.positions import rope_positions
from flagscale.data.prefetch import Prefetcher
from flagscale.data.records import SampleError
from flagscale.data.sampler import NO_SAMPLE, SequentialSampler, ShuffledSampler
from flagscale.data.tokenizer import load_tokenizer
from flagscale.plan.flops import language_training_flops, vision_item_flops, vision_item_training_flops

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flagscale.config.schema import Config
    from flagscale.plan.plan import ExperimentPlan

TRAIN = "train"
VALID = "valid"


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A sample with one image, for people: its file, and what is asked about it."""

    image: Path
    question: str


def open_source(config: Config, path: str) -> Source:
    """A JSONL file with the tokenizer and image settings of the configuration. Raises UserError."""
    return Source(path, load_tokenizer(config.data.tokenizer, config.model), ImageSettings.of(config))


def prepare_indexes(config: Config) -> dict[str, Path]:
    """Build or find the index of every split, and check that its samples fit; to be done by one process before others.

    Raises:
        UserError: for the first sample that cannot be used, naming source, line, id, cause and remedy.
    """
    paths = {TRAIN: config.data.train_path, VALID: config.data.valid_path}
    indexes = {}
    for split, path in paths.items():
        if path is not None:
            source = open_source(config, path)
            with SampleIndex.open(source, config.data.cache_path) as index:
                index.check_lengths(config.model.seq_length)
                indexes[split] = index.path
    return indexes


class DataPipeline:
    """The macro batches of a split, for one rank; a pure function of the step, apart from what is read ahead.

    Args:
        plan: the experiment.
        split: `TRAIN` (shuffled, `train_iters` global batches over as many epochs as that takes) or `VALID` (in file
            order, each sample once, the last global batch filled with empty slots).
        rank: world rank.

    Attributes:
        index: the split's index.
        num_batches: global batches there are; `step` takes 0 .. num_batches - 1.
        wait_s: seconds that `step` has waited for data, in all.

    Raises:
        UserError: when the data cannot be used.
    """

    def __init__(self, plan: ExperimentPlan, split: str, rank: int) -> None:
        config = plan.config
        path = config.data.train_path if split == TRAIN else config.data.valid_path
        assert path is not None, f"the configuration has no {split} data"
        self._plan = plan
        self._rank = rank
        self._replica = plan.language.coordinate(rank)["dp"]
        self.index = SampleIndex.open(open_source(config, path), config.data.cache_path)
        self.index.check_lengths(config.model.seq_length)
        self._reader = ImageReader(self.index.source.settings)
        self._sampler: ShuffledSampler | SequentialSampler
        size, model = config.model.global_batch_size, config.model
        if split == TRAIN:
            self._sampler = ShuffledSampler(num_samples=len(self.index), global_batch_size=size, seed=model.seed)
            self.num_batches = model.train_iters
        else:
            self._sampler = SequentialSampler(num_samples=len(self.index), global_batch_size=size)
            self.num_batches = self._sampler.num_batches
        # A validation usually ends after eval_iters: what it does not ask for is not read ahead.
        self._pause = self.num_batches if split == TRAIN else min(model.eval_iters, self.num_batches)
        self._prefetcher: Prefetcher[MacroBatch] | None = None
        self._next = (-1, 0)  # (step, macro batch) that the prefetcher hands out next
        self.wait_s = 0.0

    @property
    def decoded(self) -> int:
        """Image files this rank has decoded, those read ahead included."""
        return self._reader.decoded

    def sample_ids(self, step: int) -> list[int]:
        """Sample ids of the global batch, in batch order; `NO_SAMPLE` for empty slots."""
        return self._sampler.sample_ids(step)

    def num_samples(self, step: int) -> int:
        """Samples of the global batch."""
        return len(self._filled(step))

    def num_tokens(self, step: int) -> int:
        """Tokens of the global batch, padding left out."""
        return sum(self.index.num_tokens(i) for i in self._filled(step))

    def num_loss_tokens(self, step: int) -> int:
        """Targets of the language loss in the global batch."""
        return self.index.num_loss_tokens(self._filled(step))

    def num_mtp_loss_tokens(self, step: int) -> int:
        """Targets of the multi-token-prediction loss in the global batch."""
        return self.index.num_mtp_loss_tokens(self._filled(step))

    def _filled(self, step: int) -> list[int]:
        return [i for i in self._sampler.sample_ids(step) if i != NO_SAMPLE]

    def flops(self, step: int) -> float:
        """Model FLOPs of forward and backward of the global batch: its images as they are, its texts padded to S."""
        model = self._plan.config.model
        grids = [(item.grid_h, item.grid_w) for i in self._filled(step) for item in self.index.placements(i)]
        visual = sum(vision_item_training_flops(model, *grid) for grid in grids)
        return visual + language_training_flops(model, model.global_batch_size, model.seq_length)

    def specs(self, step: int) -> list[MacroBatchSpec]:
        """The macro batches of a step, equal on every rank."""
        return split_step(step, self._sampler.sample_ids(step), self.index, self._plan, self._cost)

    def _cost(self, grid_h: int, grid_w: int) -> int:
        """Work of encoding an item: FLOPs of the vision encoder."""
        return int(vision_item_flops(self._plan.config.model, grid_h, grid_w))

    def step(self, step: int) -> Iterator[MacroBatch]:
        """The macro batches of a step with this rank's tensors.

        Steps in a row are read ahead across their border; any other step starts the reading anew.

        Raises:
            UserError: when a sample cannot be read.
            IndexError: when there is no such step.
        """
        if not 0 <= step < self.num_batches:
            raise IndexError(f"step {step} is outside 0..{self.num_batches - 1}")
        if self._plan.config.data.prefetch == 0:
            yield from self._timed(self._read_steps(step, step + 1))
            return
        if self._prefetcher is None or self._next != (step, 0) or step == self._pause:
            self._prefetcher = self._restart(step)
        prefetcher = self._prefetcher
        for number in range(len(self._plan.batch.macro_batches)):
            assert self._next == (step, number), f"{self._next} is read, not {(step, number)}: finish a step first"
            start = time.perf_counter()
            macro = prefetcher.get()
            self.wait_s += time.perf_counter() - start
            last = number + 1 == len(self._plan.batch.macro_batches)
            self._next = (step + 1, 0) if last else (step, number + 1)
            yield macro

    def _timed(self, batches: Iterator[MacroBatch]) -> Iterator[MacroBatch]:
        """The same batches, the time spent on each added to `wait_s`."""
        while True:
            start = time.perf_counter()
            macro = next(batches, None)
            self.wait_s += time.perf_counter() - start
            if macro is None:
                return
            yield macro

    def _restart(self, step: int) -> Prefetcher[MacroBatch]:
        """Read ahead from `step` on."""
        self.close()
        end = self._pause if step < self._pause else self.num_batches
        self._next = (step, 0)
        return Prefetcher(self._read_steps(step, end), self._plan.config.data.prefetch)

    def _read_steps(self, first: int, end: int) -> Iterator[MacroBatch]:
        for step in range(first, end):
            for spec in self.specs(step):
                yield self._read(spec)

    def _read(self, spec: MacroBatchSpec) -> MacroBatch:
        """This rank's part of a macro batch."""
        texts = tuple(self._text_batch(replicas[self._replica]) for replicas in spec.sample_ids)
        media: dict[int, tuple[str, tuple[Path, ...]]] = {}
        pixels = {}
        for i in spec.reads.get(self._rank, ()):
            sample_id = spec.sample_of(spec.items[i])
            if sample_id not in media:
                media[sample_id] = self.index.media(sample_id)
            pixels[i] = self._pixels(spec, i, *media[sample_id])
        return MacroBatch(spec, texts, pixels)

    def _pixels(self, spec: MacroBatchSpec, i: int, record_id: str, files: Sequence[Path]) -> torch.Tensor:
        """Patches [P, D] of item i."""
        item = spec.items[i]
        try:
            pixels_PD, grid = self._reader.read(files[item.media])
            if grid != (item.grid_h, item.grid_w):
                raise SampleError(
                    f"has the image {files[item.media]}, which changed size after it was indexed; "
                    f"remove {self.index.path} so that the index is built anew"
                )
        except SampleError as error:
            raise self.index.error(spec.sample_of(item), record_id, error) from None
        return torch.from_numpy(pixels_PD)

    def _text_batch(self, sample_ids: Sequence[int]) -> TextBatch:
        """The microbatch of these samples."""
        settings = self.index.source.settings
        pad = self.index.source.tokenizer.special.pad
        shape = (len(sample_ids), self._plan.config.model.seq_length)
        ids_BS = np.full(shape, pad, dtype=np.int64)
        labels_BS = np.full(shape, pad, dtype=np.int64)
        mask_BS = np.zeros(shape, dtype=np.float32)
        positions_3BS = np.zeros((3, *shape), dtype=np.int64)
        for b, sample_id in enumerate(sample_ids):
            if sample_id == NO_SAMPLE:
                continue
            encoded = self.index.read(sample_id).encoded
            length = len(encoded.tokens_T)
            ids_BS[b, :length] = encoded.tokens_T
            mask_BS[b, : length - 1] = encoded.is_target_T[1:]
            positions_3BS[:, b, :length] = rope_positions(length, encoded.placements, settings.merge_size)
        labels_BS[:, :-1] = ids_BS[:, 1:]
        return TextBatch(
            input_ids_BS=torch.from_numpy(ids_BS),
            labels_BS=torch.from_numpy(labels_BS),
            loss_mask_BS=torch.from_numpy(mask_BS),
            position_ids_3BS=torch.from_numpy(positions_3BS),
            sample_ids=tuple(sample_ids),
        )

    def shown(self, sample_id: int) -> ShownSample | None:
        """The sample for people; None unless it has one image and one question about it."""
        text = self.index.read(sample_id)
        questions = [turn for turn in text.record.turns if turn.role == "user"]
        if len(text.media) != 1 or len(questions) != 1:
            return None
        return ShownSample(text.media[0], " ".join(part for part in questions[0].parts if isinstance(part, str)))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.index.source.tokenizer.decode(token_ids)

    def close(self) -> None:
        """End the background worker; the pipeline can be used again."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
