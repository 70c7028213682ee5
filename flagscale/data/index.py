"""The index of a source: token counts and grids of every sample, known before any image is opened."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flagscale.data.chat import EncodedSample, Placement, shapes_of
from flagscale.data.index_build import BadSample, build_index, read_bad
from flagscale.data.index_file import IndexFile
from flagscale.data.records import Record, SampleError
from flagscale.data.stores import Locator

if TYPE_CHECKING:

    from flagscale.config.errors import UserError
    from flagscale.data.source import Source

ROWS_KEPT = 4096  # of the samples asked for last: those of a step are asked for several times


@dataclass(frozen=True, slots=True)
class SampleText:
    """A sample as read: the conversation and its tokens."""

    record: Record
    encoded: EncodedSample


class SampleIndex:
    """An index with its source. A lookup reads the row asked for, so memory does not grow with the number of samples.

    Attributes:
        source: whose samples these are.
        path: the file.
        bytes_read: of the records read.
    """

    def __init__(self, source: Source, path: Path) -> None:
        self.source = source
        self.path = path
        self.bytes_read = 0
        self._file = IndexFile(path)
        self._row = lru_cache(maxsize=ROWS_KEPT)(self._file.row)

    @classmethod
    def open(cls, source: Source, cache_path: str | Path | None = None) -> SampleIndex:
        """The index of `source`, built when there is none. Raises UserError, see `build_index`."""
        return cls(source, build_index(source, cache_path))

    def __len__(self) -> int:
        return self._file.num_samples

    def num_tokens(self, sample_id: int) -> int:
        """Length of the sample in tokens."""
        return self._row(sample_id).num_tokens

    def num_loss_tokens(self, sample_id: int) -> int:
        """Targets of the language loss in the sample."""
        return self._row(sample_id).num_loss_tokens

    def num_mtp_loss_tokens(self, sample_id: int) -> int:
        """Targets of the multi-token-prediction loss in the sample."""
        return self._row(sample_id).num_mtp_loss_tokens

    def placements(self, sample_id: int) -> tuple[Placement, ...]:
        """Visual items of the sample, in the order of their placeholders."""
        return tuple(Placement(*item) for item in self._file.items(self._row(sample_id)))

    def column(self, name: str) -> np.ndarray:
        """A field of `index_file.ROW` over all samples; a copy."""
        return np.concatenate([chunk[name] for chunk in self._file.chunks()])

    def items(self) -> np.ndarray:
        """The visual items of all samples, as an array of `index_file.ITEM`; a copy."""
        return self._file.all_items()

    def bad_samples(self) -> list[BadSample]:
        """The samples of the source that are not in the index."""
        return read_bad(self.path)

    def check_lengths(self, seq_length: int) -> None:
        """Raise UserError, naming the first sample longer than `seq_length` tokens."""
        if self._file.longest <= seq_length:
            return
        sample_id = int(np.argmax(self.column("num_tokens") > seq_length))
        raise self.error(
            sample_id,
            self.record(sample_id).id,
            f"has {self.num_tokens(sample_id)} tokens, more than model.seq_length={seq_length}; the longest "
            f"of the source has {self._file.longest}: raise model.seq_length, lower data.max_pixels, shorten the "
            "sample, or set data.on_too_long",
        )

    def error(self, sample_id: int, record_id: str, cause: object) -> UserError:
        """The error for a sample of this index."""
        return self.source.error(self._locator(sample_id), record_id, cause)

    def _locator(self, sample_id: int) -> Locator:
        row = self._row(sample_id)
        return Locator(row.shard, row.offset, row.length, row.line)

    def record(self, sample_id: int) -> Record:
        """The sample's record. Raises UserError when it cannot be read any more."""
        try:
            record = self.source.store.record(self._locator(sample_id))
        except SampleError as error:
            raise self.error(sample_id, "", error) from None
        self.bytes_read += record.num_bytes
        return record

    def read(self, sample_id: int) -> SampleText:
        """The sample's text and tokens; its media are not read.

        Raises:
            UserError: when the record no longer is what was indexed.
        """
        record, placements = self.record(sample_id), self.placements(sample_id)
        try:
            encoded = self.source.encode(record, shapes_of(placements))
        except SampleError as error:
            raise self.error(sample_id, record.id, error) from None
        if len(encoded.tokens_T) != self.num_tokens(sample_id) or encoded.placements != placements:
            raise self.error(sample_id, record.id, "changed after it was indexed; start the run again")
        return SampleText(record, encoded)

    def __enter__(self) -> SampleIndex:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
