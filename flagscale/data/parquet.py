"""Parquet files as a store of records, with their media embedded or named.

A Parquet row cannot be read without its row group. So the rows are copied once into an Arrow file beside the index,
uncompressed and memory-mapped: a row then costs its own bytes, and is mapped only while it is read.
"""

from __future__ import annotations

import dataclasses
import errno
import mmap
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flagscale.config.errors import UserError
from flagscale.data.records import IMAGE, MARKS, Media, Record, SampleError, parse_record
from flagscale.data.stores import Locator

ROWS = 256  # of an Arrow record batch: what is decompressed at a time
READS_MAPPED = 16  # records after which the pages of the copy that they touched are given back
MEDIA_COLUMNS = {name: kind for kind in MARKS for name in (kind, f"{kind}s")}


class ParquetStore:
    """Parquet files with a column `conversations`, `messages` or `text`, and `image(s)` or `video(s)`.

    Media are names, bytes, or `{"bytes", "path"}` as the `datasets` library writes them. `attach` comes before anything
    is read.
    """

    unit = "row"

    def __init__(self, path: Path, files: tuple[Path, ...]) -> None:
        self.path, self.files = path, files
        self._map: mmap.mmap | None = None
        self._rows: pa.RecordBatchFileReader | None = None
        self._newest: tuple[int, pa.RecordBatch] | None = None  # the batch that was read last, with its number
        self._lock = threading.Lock()
        self._reads = 0

    def attach(self, copy: Path) -> None:
        """Read the rows from this Arrow file, which is written when it is not there."""
        if not copy.is_file():
            temporary = copy.with_name(f".{copy.name}.{uuid.uuid4().hex}")
            try:
                self._convert(temporary)
                temporary.replace(copy)
            finally:
                temporary.unlink(missing_ok=True)
        with copy.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._rows = pa.ipc.open_file(pa.py_buffer(self._map))
        except pa.ArrowException as error:
            raise UserError(f"{copy}: is damaged ({error}); remove it, and it is written anew") from None

    def _convert(self, target: Path) -> None:
        try:
            schema = pq.read_schema(self.files[0])
            with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for path in self.files:
                    with pq.ParquetFile(path) as file:
                        for batch in file.iter_batches(batch_size=ROWS):
                            for start in range(0, batch.num_rows, ROWS):
                                writer.write_batch(_ordered(batch.slice(start, ROWS), schema).cast(schema))
        except (ValueError, pa.ArrowException, OSError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise
            reason = str(error).splitlines()[0]
            raise UserError(f"data source {self.path}: is no readable Parquet ({reason}); replace the file") from None

    def locators(self) -> Iterator[Locator]:
        assert self._rows is not None, "attach comes first"
        number = 0
        for i in range(self._rows.num_record_batches):
            for row in range(self._batch(i).num_rows):
                number += 1
                yield Locator(i, row, 1, number)

    def record(self, locator: Locator) -> Record:
        assert self._rows is not None, "attach comes first"
        if locator.shard >= self._rows.num_record_batches or locator.offset >= self._batch(locator.shard).num_rows:
            raise SampleError("is not in the file any more; start the run again")
        batch = self._batch(locator.shard)
        texts = [name for name in batch.schema.names if name not in MEDIA_COLUMNS]
        try:
            cells = {name: batch.column(name)[locator.offset] for name in batch.schema.names}
            record = parse_record({name: _value(cell, MEDIA_COLUMNS.get(name)) for name, cell in cells.items()})
        except (UnicodeDecodeError, pa.ArrowException) as error:
            raise SampleError(f"cannot be read ({error}); correct the row") from None
        num_bytes = batch.slice(locator.offset, 1).select(texts).nbytes
        self._give_back()
        return dataclasses.replace(record, num_bytes=num_bytes)

    def _batch(self, number: int) -> pa.RecordBatch:
        """A batch of rows. Arrow does not promise that its reader takes several threads."""
        assert self._rows is not None
        with self._lock:
            if self._newest is None or self._newest[0] != number:
                self._newest = (number, self._rows.get_batch(number))
            return self._newest[1]

    def _give_back(self) -> None:
        """Unmap what was read now and then: it is the system's cache, but would count to this process as long as it is
        mapped, which for a large source is for good."""
        assert self._map is not None
        self._reads += 1
        if self._reads % READS_MAPPED == 0:
            self._map.madvise(mmap.MADV_DONTNEED)


def _ordered(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with its columns in the schema's order, where they are the same ones."""
    return batch.select(schema.names) if sorted(batch.schema.names) == sorted(schema.names) else batch


def _value(cell: pa.Scalar, kind: str | None) -> Any:
    """A cell as plain data; bytes of media are left where they are until they are loaded."""
    if kind is None or not cell.is_valid:
        return cell.as_py()
    if _is_list(cell):
        return [_value(one, IMAGE if _is_list(one) else kind) for one in cell]  # a list in it is a video's frames
    data, name = cell, f"embedded {kind}"
    if isinstance(cell, pa.StructScalar) and "bytes" in cell.keys():  # noqa: SIM118 a scalar is no mapping
        path = cell["path"].as_py() if "path" in cell.keys() else None  # noqa: SIM118
        data, name = cell["bytes"], path or name
        if not data.is_valid:
            return path
    if pa.types.is_binary(data.type) or pa.types.is_large_binary(data.type):
        return Media(kind, name, data.as_py)
    return cell.as_py()


def _is_list(cell: pa.Scalar) -> bool:
    return isinstance(cell, pa.ListScalar | pa.LargeListScalar) and cell.is_valid
