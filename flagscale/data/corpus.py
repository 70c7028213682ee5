"""The samples of all sources of a split under one numbering: ids count over the sources, in their order."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from flagscale.config.mix import ONLY, SourceSpec, training_sources
from flagscale.data.image import ImageSettings
from flagscale.data.index import SampleIndex, SampleText
from flagscale.data.index_build import BadSample
from flagscale.data.records import Record, SampleError
from flagscale.data.source import Policy, Source
from flagscale.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

    from flagscale.config.schema import Config
    from flagscale.data.chat import Placement

TRAIN = "train"
VALID = "valid"
ENERGON_SPLIT = {TRAIN: "train", VALID: "val"}


class Corpus:
    """Samples by id, with what is known of them before they are read.

    Attributes:
        names: of the sources.
        sizes: samples of each.
    """

    def __init__(self, names: Sequence[str], indexes: Sequence[SampleIndex]) -> None:
        self.names = tuple(names)
        self.sizes = tuple(len(index) for index in indexes)
        self.indexes = tuple(indexes)
        self._firsts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self._readers = [index.source.reader() for index in indexes]

    @classmethod
    def open(cls, config: Config, split: str) -> Corpus:
        """The split's sources, indexed when they are not yet, in the order of the configuration.

        Raises:
            UserError: when a source cannot be used, or one of its samples that is not to be skipped.
        """
        indexes = []
        specs = split_sources(config, split)
        for spec in specs:
            index = SampleIndex.open(open_source(config, spec.path, split), config.data.cache_path)
            index.check_lengths(config.model.seq_length)
            indexes.append(index)
        return cls([spec.name for spec in specs], indexes)

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def decoded(self) -> int:
        """Images and frames whose pixels were read."""
        return sum(reader.decoded for reader in self._readers)

    @property
    def media_bytes(self) -> int:
        """Bytes of the image files and frames that were decoded."""
        return sum(reader.bytes_read for reader in self._readers)

    @property
    def record_bytes(self) -> int:
        """Bytes of the records read."""
        return sum(index.bytes_read for index in self.indexes)

    @property
    def pad(self) -> int:
        """Token id of padding."""
        return self.indexes[0].source.tokenizer.special.pad

    @property
    def merge_size(self) -> int:
        """Patches a side that make one token."""
        return self.indexes[0].source.settings.merge_size

    def source_of(self, sample_id: int) -> int:
        """Number of the source that a sample is of."""
        return bisect_right(self._firsts, sample_id) - 1

    def _at(self, sample_id: int) -> tuple[SampleIndex, int]:
        number = self.source_of(sample_id)
        return self.indexes[number], sample_id - self._firsts[number]

    def num_tokens(self, sample_id: int) -> int:
        """Length of a sample in tokens."""
        index, local = self._at(sample_id)
        return index.num_tokens(local)

    def num_loss_tokens(self, sample_ids: Sequence[int]) -> int:
        """Targets of the language loss over samples."""
        return sum(index.num_loss_tokens(local) for index, local in map(self._at, sample_ids))

    def num_mtp_loss_tokens(self, sample_ids: Sequence[int]) -> int:
        """Targets of the multi-token-prediction loss over samples."""
        return sum(index.num_mtp_loss_tokens(local) for index, local in map(self._at, sample_ids))

    def placements(self, sample_id: int) -> tuple[Placement, ...]:
        """Visual items of a sample, in the order of their placeholders."""
        index, local = self._at(sample_id)
        return index.placements(local)

    def read(self, sample_id: int) -> SampleText:
        """Text and tokens of a sample. Raises UserError."""
        index, local = self._at(sample_id)
        return index.read(local)

    def record(self, sample_id: int) -> Record:
        """Record of a sample with its media. Raises UserError."""
        index, local = self._at(sample_id)
        return index.record(local)

    def pixels(
        self, sample_id: int, record: Record, items: Sequence[tuple[int, int, tuple[int, int]]]
    ) -> list[np.ndarray]:
        """Patches float32 [P, D] of visual items of a sample, each given as (media, frame, grid).

        Raises:
            UserError: when one cannot be read, or has another grid than the index says.
        """
        index, local = self._at(sample_id)
        reader = self._readers[self.source_of(sample_id)]
        found: dict[tuple[int, int], np.ndarray] = {}
        try:
            for number in dict.fromkeys(media for media, _, _ in items):
                wanted = {frame: grid for media, frame, grid in items if media == number}
                for frame, (pixels_PD, grid) in reader.read(record.media[number], list(wanted)).items():
                    if grid != wanted[frame]:
                        raise SampleError(
                            f"has the {record.media[number].kind} {record.media[number].name}, which changed size "
                            f"after it was indexed; remove {index.path} so that the index is built anew"
                        )
                    found[number, frame] = pixels_PD
        except SampleError as error:
            raise index.error(local, record.id, error) from None
        return [found[media, frame] for media, frame, _ in items]

    def shown(self, sample_id: int, record: Record) -> Path | bytes:
        """The first image of a sample, for people."""
        return self._readers[self.source_of(sample_id)].shown(record.media[0])

    def bad_samples(self) -> list[BadSample]:
        """The samples of the sources that were left out."""
        return [sample for index in self.indexes for sample in index.bad_samples()]

    def close(self) -> None:
        """Unmap the indexes."""
        for index in self.indexes:
            index.close()


def split_sources(config: Config, split: str) -> tuple[SourceSpec, ...]:
    """The sources of a split, in the order of the configuration."""
    if split == TRAIN:
        return training_sources(config)
    assert config.data.valid_path is not None, "the configuration has no held-out data"
    return (SourceSpec(ONLY, config.data.valid_path, ((0.0, 1.0),)),)


def open_source(config: Config, path: str, split: str = TRAIN) -> Source:
    """A source with the tokenizer and settings of the configuration. Raises UserError."""
    return Source(
        path,
        load_tokenizer(config.data.tokenizer, config.model),
        ImageSettings.of(config),
        policy=Policy.of(config),
        split=ENERGON_SPLIT[split],
        media_root=config.data.media_root,
    )
