"""The index of a source, memory-mapped: token counts and grids of every sample, known before any image is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from flagscale.data.chat import EncodedSample, Placement, shapes_of
from flagscale.data.index_build import ITEM, SCHEMA, BadSample, build_index, read_bad
from flagscale.data.records import Record, SampleError
from flagscale.data.stores import Locator

if TYPE_CHECKING:

    from flagscale.config.errors import UserError
    from flagscale.data.source import Source


@dataclass(frozen=True, slots=True)
class SampleText:
    """A sample as read: the conversation and its tokens."""

    record: Record
    encoded: EncodedSample


class SampleIndex:
    """A memory-mapped index with its source. All lookups touch only the rows asked for.

    Attributes:
        source: whose samples these are.
        path: the Arrow file.
        bytes_read: of the records read.
    """

    def __init__(self, source: Source, path: Path) -> None:
        self.source = source
        self.path = path
        self.bytes_read = 0
        self._file = pa.memory_map(str(path))
        reader = pa.ipc.open_file(self._file)
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        scalars = [name for name in SCHEMA.names if name != "items"]
        self._columns = [{name: batch.column(name).to_numpy() for name in scalars} for batch in batches]
        self._items = [_ItemColumns(batch.column("items")) for batch in batches]
        self._batch_rows = batches[0].num_rows  # of all but the last
        self._length = sum(batch.num_rows for batch in batches)

    @classmethod
    def open(cls, source: Source, cache_path: str | Path | None = None) -> SampleIndex:
        """The index of `source`, built when there is none. Raises UserError, see `build_index`."""
        return cls(source, build_index(source, cache_path))

    def __len__(self) -> int:
        return self._length

    def _value(self, name: str, sample_id: int) -> int:
        batch, row = divmod(sample_id, self._batch_rows)
        return int(self._columns[batch][name][row])

    def num_tokens(self, sample_id: int) -> int:
        """Length of the sample in tokens."""
        return self._value("num_tokens", sample_id)

    def num_loss_tokens(self, sample_id: int) -> int:
        """Targets of the language loss in the sample."""
        return self._value("num_loss_tokens", sample_id)

    def num_mtp_loss_tokens(self, sample_id: int) -> int:
        """Targets of the multi-token-prediction loss in the sample."""
        return self._value("num_mtp_loss_tokens", sample_id)

    def placements(self, sample_id: int) -> tuple[Placement, ...]:
        """Visual items of the sample, in the order of their placeholders."""
        batch, row = divmod(sample_id, self._batch_rows)
        return self._items[batch].row(row)

    def column(self, name: str) -> np.ndarray:
        """A column of `SCHEMA` (not `items`) over all samples; a copy."""
        return np.concatenate([columns[name] for columns in self._columns])

    def bad_samples(self) -> list[BadSample]:
        """The samples of the source that are not in the index."""
        return read_bad(self.path)

    def check_lengths(self, seq_length: int) -> None:
        """Raise UserError, naming the first sample longer than `seq_length` tokens."""
        for number, columns in enumerate(self._columns):
            lengths = columns["num_tokens"]
            if lengths.max() <= seq_length:
                continue
            sample_id = number * self._batch_rows + int(np.argmax(lengths > seq_length))
            longest = max(int(c["num_tokens"].max()) for c in self._columns)
            raise self.error(
                sample_id,
                self._record(sample_id, with_media=False).id,
                f"has {self.num_tokens(sample_id)} tokens, more than model.seq_length={seq_length}; the longest "
                f"of the source has {longest}: raise model.seq_length, lower data.max_pixels, shorten the sample, "
                "or set data.on_too_long",
            )

    def error(self, sample_id: int, record_id: str, cause: object) -> UserError:
        """The error for a sample of this index."""
        return self.source.error(self._locator(sample_id), record_id, cause)

    def _locator(self, sample_id: int) -> Locator:
        return Locator(*(self._value(name, sample_id) for name in ("shard", "offset", "length", "line")))

    def _record(self, sample_id: int, with_media: bool) -> Record:
        """The sample's record. Raises UserError when it cannot be read any more."""
        locator = self._locator(sample_id)
        self.bytes_read += locator.length
        try:
            return self.source.store.record(locator, with_media)
        except SampleError as error:
            raise self.error(sample_id, "", error) from None

    def read(self, sample_id: int) -> SampleText:
        """The sample's text and tokens; its media are not read.

        Raises:
            UserError: when the record no longer is what was indexed.
        """
        record, placements = self._record(sample_id, with_media=False), self.placements(sample_id)
        try:
            encoded = self.source.encode(record, shapes_of(placements))
        except SampleError as error:
            raise self.error(sample_id, record.id, error) from None
        if len(encoded.tokens_T) != self.num_tokens(sample_id) or encoded.placements != placements:
            raise self.error(sample_id, record.id, "changed after it was indexed; start the run again")
        return SampleText(record, encoded)

    def record(self, sample_id: int) -> Record:
        """The sample's record with its media. Raises UserError when it cannot be read any more."""
        return self._record(sample_id, with_media=True)

    def __enter__(self) -> SampleIndex:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        self._columns, self._items = [], []
        self._file.close()


class _ItemColumns:
    """The items of a record batch as flat arrays with row offsets; views of the mapped file."""

    def __init__(self, column: pa.ListArray) -> None:
        self._offsets = column.offsets.to_numpy()
        values = column.values
        self._fields = [values.field(field.name).to_numpy() for field in ITEM]

    def row(self, row: int) -> tuple[Placement, ...]:
        first, last = int(self._offsets[row]), int(self._offsets[row + 1])
        return tuple(Placement(*(int(field[i]) for field in self._fields)) for i in range(first, last))
