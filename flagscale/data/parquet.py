"""Parquet files as a store of records, with their media embedded or named.

A Parquet row cannot be read without its row group. So the rows are copied once into an Arrow file beside the index,
uncompressed and memory-mapped: a row then costs its own bytes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flagscale.config.errors import UserError
from flagscale.data.records import MARKS, Media, Record, SampleError, parse_record
from flagscale.data.stores import Locator

ROWS = 256  # of an Arrow record batch: what is decompressed at a time
MEDIA_COLUMNS = {name: kind for kind in MARKS for name in (kind, f"{kind}s")}


class ParquetStore:
    """Parquet files with a column `conversations`, `messages` or `text`, and `image(s)` or `video(s)`.

    Media are names, bytes, or `{"bytes", "path"}` as the `datasets` library writes them. `copy` is set by the index
    before a record is read.
    """

    unit = "row"

    def __init__(self, path: Path, files: tuple[Path, ...]) -> None:
        self.path, self.files = path, files
        self._copy: Path | None = None
        self._batches: list[pa.RecordBatch] = []

    def attach(self, copy: Path) -> None:
        """Read the rows from this Arrow file, which is written when it is not there."""
        if not copy.is_file():
            temporary = copy.with_name(f".{copy.name}.{uuid.uuid4().hex}")
            try:
                self._convert(temporary)
                temporary.replace(copy)
            finally:
                temporary.unlink(missing_ok=True)
        reader = pa.ipc.open_file(pa.memory_map(str(copy)))
        self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]

    def _convert(self, target: Path) -> None:
        try:
            schema = pq.read_schema(self.files[0])
            with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for path in self.files:
                    with pq.ParquetFile(path) as file:
                        for batch in file.iter_batches(batch_size=ROWS):
                            for start in range(0, batch.num_rows, ROWS):
                                writer.write_batch(batch.slice(start, ROWS).cast(schema))
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"data source {self.path}: is no readable Parquet ({reason}); replace the file") from None

    def locators(self) -> Iterator[Locator]:
        number = 0
        for i, batch in enumerate(self._batches):
            for row in range(batch.num_rows):
                number += 1
                yield Locator(i, row, 1, number)

    def record(self, locator: Locator, with_media: bool) -> Record:
        if locator.shard >= len(self._batches) or locator.offset >= self._batches[locator.shard].num_rows:
            raise SampleError("is not in the file any more; start the run again")
        batch = self._batches[locator.shard]
        return parse_record(
            {
                name: _value(batch.column(name)[locator.offset], MEDIA_COLUMNS.get(name), with_media)
                for name in batch.schema.names
            }
        )


def _value(scalar: pa.Scalar, kind: str | None, with_media: bool) -> Any:
    """A cell as plain data; bytes of media are left where they are unless wanted."""
    if kind is None or with_media or not scalar.is_valid:
        return scalar.as_py()
    if isinstance(scalar, pa.ListScalar | pa.LargeListScalar):
        return [Media(kind, f"embedded {kind}")] * len(scalar.values)
    return Media(kind, f"embedded {kind}")
