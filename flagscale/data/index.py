"""The index of a JSONL source: token counts and image grids of every sample, known before any image is opened.

An Arrow file in the cache folder, memory-mapped by all ranks, written once. Its name holds a hash of what decides on
its content (tokenizer, image settings, format) and one of the source (size and time of change), so a stale index is
never opened: a changed source or setting has another name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from flagscale.config.errors import UserError
from flagscale.data.chat import EncodedSample, Placement, encode_chat
from flagscale.data.image import ImageReader, ImageSettings
from flagscale.data.records import Record, SampleError, media_path, parse_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flagscale.data.tokenizer import Tokenizer

FORMAT = 1  # raise it when the columns, the chat template or the reading of records change
BATCH_ROWS = 65536  # samples of an Arrow record batch: bounds the builder's memory; row i is in batch i // BATCH_ROWS
CACHE_FOLDER = ".flagscale"

_ITEM = pa.struct([(name, pa.int32()) for name in ("grid_h", "grid_w", "start", "media", "frame")])
_SCHEMA = pa.schema(
    [
        ("line", pa.int64()),
        ("offset", pa.int64()),
        ("num_tokens", pa.int32()),
        ("num_loss_tokens", pa.int32()),
        ("num_mtp_loss_tokens", pa.int32()),
        ("items", pa.list_(_ITEM)),
    ]
)


class Source:
    """A JSONL file with what turns its lines into samples.

    Raises:
        UserError: when the file cannot be read.
    """

    def __init__(self, path: str | Path, tokenizer: Tokenizer, settings: ImageSettings) -> None:
        self.path = Path(path).absolute()
        self.tokenizer = tokenizer
        self.settings = settings
        try:
            self._stat = self.path.stat()
        except OSError as error:
            raise UserError(
                f"data source {self.path}: {error.strerror}; correct data.train_path or data.valid_path"
            ) from None

    def index_path(self, cache_path: str | Path | None) -> Path:
        """Where the index of this source, as it is now, belongs."""
        folder = self.path.parent / CACHE_FOLDER if cache_path is None else Path(cache_path).absolute()
        return folder / f"{self._prefix()}{_hash(self._stat.st_size, self._stat.st_mtime_ns)}.arrow"

    def _prefix(self) -> str:
        settings = json.dumps(dataclasses.asdict(self.settings), sort_keys=True)
        return f"{self.path.name}.{_hash(FORMAT, str(self.path), self.tokenizer.fingerprint, settings)}."

    def stale_indexes(self, index_path: Path) -> list[Path]:
        """Indexes made with the same settings of an earlier state of the source."""
        return [path for path in index_path.parent.glob(f"{glob.escape(self._prefix())}*.arrow") if path != index_path]

    def read_line(self, offset: int) -> bytes:
        """The line that starts at this byte."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.readline()

    def error(self, line: int, record_id: str, cause: object) -> UserError:
        """The error for a sample: where it stands, and why it cannot be used."""
        name = f" (id {record_id})" if record_id else ""
        return UserError(f"{self.path} line {line}{name}: the sample {cause}")


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def build_index(source: Source, cache_path: str | Path | None = None) -> Path:
    """The path of an up-to-date index of `source`, built first when there is none.

    Any number of processes may call it at once: one builds, the others wait for it. The file appears whole or not at
    all, and is never written again, so readers may keep it mapped.

    Raises:
        UserError: naming source, line, id, cause and remedy, for the first sample that cannot be used; when there is
            no sample; when the cache folder cannot be written.
    """
    path = source.index_path(cache_path)
    if path.is_file():
        return path
    with _locked(path):
        if path.is_file():
            return path
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            _write(source, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        for stale in source.stale_indexes(path):
            stale.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock beside an index; the system releases it when the process dies.

    It saves work only: a file system without locks lets several builders write, each a file of its own, all alike.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(".lock").open("a")
    except OSError as error:
        raise UserError(
            f"data.cache_path: the index cannot be written to {path.parent} ({error.strerror}); name another folder"
        ) from None
    with lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(source: Source, path: Path) -> None:
    """Encode all samples of the source into an Arrow file."""
    reader = ImageReader(source.settings)
    rows: list[dict[str, object]] = []
    total = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        for line, offset, text in _lines(source.path):
            rows.append(_row(source, reader, line, offset, text))
            total += 1
            if len(rows) == BATCH_ROWS:
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=_SCHEMA))
                rows.clear()
        if rows:
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=_SCHEMA))
    if total == 0:
        raise UserError(f"{source.path}: holds no sample; write one JSON object a line")


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, byte offset, line) of every line that is not blank."""
    offset = 0
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if text.strip():
                yield number, offset, text
            offset += len(text)


def _row(source: Source, reader: ImageReader, line: int, offset: int, text: bytes) -> dict[str, object]:
    """One sample's row; opens its images' headers only."""
    record_id = ""
    try:
        record = parse_record(text)
        record_id = record.id
        grids = [reader.grid(media_path(source.path, name)) for name in record.images]
        sample = encode_chat(record, grids, source.tokenizer, source.settings.merge_size)
    except SampleError as error:
        raise source.error(line, record_id, error) from None
    return {
        "line": line,
        "offset": offset,
        "num_tokens": len(sample.tokens_T),
        "num_loss_tokens": sample.num_loss_tokens,
        "num_mtp_loss_tokens": sample.num_mtp_loss_tokens,
        "items": [dataclasses.asdict(item) for item in sample.placements],
    }


@dataclass(frozen=True, slots=True)
class SampleText:
    """A sample as read from its line: the conversation, its tokens, and its image files in media order."""

    record: Record
    encoded: EncodedSample
    media: tuple[Path, ...]


class SampleIndex:
    """A memory-mapped index with its source. All lookups touch only the rows asked for."""

    def __init__(self, source: Source, path: Path) -> None:
        self.source = source
        self.path = path
        self._file = pa.memory_map(str(path))
        reader = pa.ipc.open_file(self._file)
        self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        scalars = [name for name in _SCHEMA.names if name != "items"]
        self._columns = [{name: batch.column(name).to_numpy() for name in scalars} for batch in self._batches]
        self._items = [_ItemColumns(batch.column("items")) for batch in self._batches]

    @classmethod
    def open(cls, source: Source, cache_path: str | Path | None = None) -> SampleIndex:
        """The index of `source`, built when there is none. Raises UserError, see `build_index`."""
        return cls(source, build_index(source, cache_path))

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self._batches)

    def _value(self, name: str, sample_id: int) -> int:
        batch, row = divmod(sample_id, BATCH_ROWS)
        return int(self._columns[batch][name][row])

    def num_tokens(self, sample_id: int) -> int:
        """Length of the sample in tokens."""
        return self._value("num_tokens", sample_id)

    def num_loss_tokens(self, sample_ids: Sequence[int]) -> int:
        """Targets of the language loss over these samples."""
        return sum(self._value("num_loss_tokens", i) for i in sample_ids)

    def num_mtp_loss_tokens(self, sample_ids: Sequence[int]) -> int:
        """Targets of the multi-token-prediction loss over these samples."""
        return sum(self._value("num_mtp_loss_tokens", i) for i in sample_ids)

    def placements(self, sample_id: int) -> tuple[Placement, ...]:
        """Visual items of the sample, in the order of their placeholders."""
        batch, row = divmod(sample_id, BATCH_ROWS)
        return self._items[batch].row(row)

    def check_lengths(self, seq_length: int) -> None:
        """Raise UserError, naming the first sample longer than `seq_length` tokens."""
        for number, columns in enumerate(self._columns):
            lengths = columns["num_tokens"]
            if lengths.max() <= seq_length:
                continue
            sample_id = number * BATCH_ROWS + int(np.argmax(lengths > seq_length))
            longest = max(int(c["num_tokens"].max()) for c in self._columns)
            record = parse_record(self.source.read_line(self._value("offset", sample_id)))
            raise self.error(
                sample_id,
                record.id,
                f"has {self.num_tokens(sample_id)} tokens, more than model.seq_length={seq_length}; the longest "
                f"of the source has {longest}: raise model.seq_length, lower data.max_pixels, or shorten the sample",
            )

    def error(self, sample_id: int, record_id: str, cause: object) -> UserError:
        """The error for a sample of this index."""
        return self.source.error(self._value("line", sample_id), record_id, cause)

    def read(self, sample_id: int) -> SampleText:
        """The sample's text and tokens, from its line.

        Raises:
            UserError: when the line no longer is what was indexed.
        """
        line = self.source.read_line(self._value("offset", sample_id))
        placements = self.placements(sample_id)
        record_id = ""
        try:
            record = parse_record(line)
            record_id = record.id
            grids = [(item.grid_h, item.grid_w) for item in placements]
            encoded = encode_chat(record, grids, self.source.tokenizer, self.source.settings.merge_size)
        except SampleError as error:
            raise self.error(sample_id, record_id, error) from None
        if len(encoded.tokens_T) != self.num_tokens(sample_id) or encoded.placements != placements:
            raise self.error(sample_id, record_id, "changed after it was indexed; start the run again")
        return SampleText(record, encoded, tuple(media_path(self.source.path, name) for name in record.images))

    def media(self, sample_id: int) -> tuple[str, tuple[Path, ...]]:
        """Id of the sample and its image files, in media order. Raises UserError, see `read`."""
        try:
            record = parse_record(self.source.read_line(self._value("offset", sample_id)))
        except SampleError as error:
            raise self.error(sample_id, "", error) from None
        return record.id, tuple(media_path(self.source.path, name) for name in record.images)

    def __enter__(self) -> SampleIndex:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        self._columns, self._items, self._batches = [], [], []
        self._file.close()


class _ItemColumns:
    """The items of a record batch as flat arrays with row offsets; views of the mapped file."""

    def __init__(self, column: pa.ListArray) -> None:
        self._offsets = column.offsets.to_numpy()
        values = column.values
        self._fields = [values.field(field.name).to_numpy() for field in _ITEM]

    def row(self, row: int) -> tuple[Placement, ...]:
        first, last = int(self._offsets[row]), int(self._offsets[row + 1])
        return tuple(Placement(*(int(field[i]) for field in self._fields)) for i in range(first, last))
