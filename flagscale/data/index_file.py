"""The file of an index: rows of a fixed size, one a sample, then the visual items of all samples.

    header | num_samples rows | num_items items          little-endian

A row is read when it is asked for, with one `pread`. So a rank keeps nothing of the file, however large it is and
however much of it has been read: pages of a mapped file would count to the rank's memory, whereas these are the
system's cache, which is there once for all ranks of a machine and gives way to anything else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from flagscale.config.errors import UserError

MAGIC = b"fsindex3"
HEADER = struct.Struct("<8s3q")  # magic, samples, items, tokens of the longest sample
CHUNK = 1 << 20  # rows read at a time where all are looked at


Item = tuple[int, int, int, int, int, int]
"""A visual item: the fields of a `chat.Placement`, in their order."""


class Row(NamedTuple):
    """What the index knows of a sample, its visual items apart.

    Attributes:
        shard, offset, length, line: where its record lies (`stores.Locator`).
        first_item, num_items: its visual items among those of all samples.
        num_tokens: its length in tokens.
        num_loss_tokens, num_mtp_loss_tokens: targets of the two losses.
    """

    offset: int
    length: int
    line: int
    first_item: int
    shard: int
    num_items: int
    num_tokens: int
    num_loss_tokens: int
    num_mtp_loss_tokens: int


ROW = np.dtype([(name, "<i8" if i < 4 else "<i4") for i, name in enumerate(Row._fields)])
ITEM = np.dtype([(name, "<i4") for name in ("grid_h", "grid_w", "start", "media", "frame", "time")])
_ROW, _ITEM = struct.Struct("<4q5i"), struct.Struct("<6i")
assert (_ROW.size, _ITEM.size) == (ROW.itemsize, ITEM.itemsize), "arrays and single reads differ"


class IndexWriter:
    """Takes the samples of an index one by one; `index_writer` makes it."""

    def __init__(self, rows: BinaryIO, items: BinaryIO) -> None:
        self._rows, self._items = rows, items
        self.num_samples = self.num_items = self.longest = 0

    def add(self, row: Row, items: Sequence[Item]) -> None:
        """Append a sample; `first_item` and `num_items` of the row are set here."""
        row = row._replace(first_item=self.num_items, num_items=len(items))
        self._rows.write(_ROW.pack(*row))
        for item in items:
            self._items.write(_ITEM.pack(*item))
        self.num_samples += 1
        self.num_items += len(items)
        self.longest = max(self.longest, row.num_tokens)


@contextlib.contextmanager
def index_writer(path: Path) -> Iterator[IndexWriter]:
    """What writes an index; the file is whole when the block ends without an error. Raises OSError."""
    with path.open("wb") as rows, tempfile.TemporaryFile(dir=path.parent) as items:
        rows.write(bytes(HEADER.size))
        writer = IndexWriter(rows, items)
        yield writer
        items.seek(0)
        shutil.copyfileobj(items, rows)
        rows.seek(0)
        rows.write(HEADER.pack(MAGIC, writer.num_samples, writer.num_items, writer.longest))


class IndexFile:
    """An index, read row by row; by several threads at once if need be.

    Attributes:
        num_samples, num_items: how many there are.
        longest: tokens of the longest sample.

    Raises:
        UserError: when the file is no whole index.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        header = self._file.read(HEADER.size)
        magic, self.num_samples, self.num_items, self.longest = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
        self._items_at = HEADER.size + self.num_samples * ROW.itemsize
        size = self._items_at + self.num_items * ITEM.itemsize
        if magic != MAGIC or os.fstat(self._file.fileno()).st_size != size:
            self.close()
            raise UserError(f"{path}: is a damaged index; remove it, and it is built anew")

    def row(self, sample_id: int) -> Row:
        """The row of a sample."""
        assert 0 <= sample_id < self.num_samples, f"sample {sample_id} is outside 0..{self.num_samples - 1}"
        place = HEADER.size + sample_id * _ROW.size
        return Row._make(_ROW.unpack(os.pread(self._file.fileno(), _ROW.size, place)))

    def items(self, row: Row) -> list[Item]:
        """The visual items of a sample, with the fields of `ITEM`."""
        if not row.num_items:
            return []
        place, size = self._items_at + row.first_item * _ITEM.size, row.num_items * _ITEM.size
        return list(_ITEM.iter_unpack(os.pread(self._file.fileno(), size, place)))

    def chunks(self) -> Iterator[np.ndarray]:
        """The rows of all samples as arrays of `ROW`, in order; a copy."""
        for first in range(0, self.num_samples, CHUNK):
            yield self._array(ROW, HEADER.size + first * ROW.itemsize, min(CHUNK, self.num_samples - first))

    def all_items(self) -> np.ndarray:
        """The visual items of all samples as an array of `ITEM`; a copy."""
        return self._array(ITEM, self._items_at, self.num_items)

    def _array(self, kind: np.dtype, place: int, count: int) -> np.ndarray:
        self._file.seek(place)
        return np.fromfile(self._file, kind, count)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
