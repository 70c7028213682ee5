"""Where the records of a source lie, and how one of them is read without the others.

A store finds its records once, when the index is built, and reads a record by its locator afterwards. JSON files are
here, WebDataset tar files in `webdataset.py`, Parquet files in `parquet.py`.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flagscale.config.errors import UserError
from flagscale.data.records import Record, SampleError, parse_record

IMAGE_SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif"})
VIDEO_SUFFIXES = frozenset({"mp4", "mov", "avi", "mkv", "webm"})


@dataclass(frozen=True, slots=True)
class Locator:
    """A record's place: number of the file, first byte and bytes in it (Parquet: row and 1), and for people its line
    (WebDataset, Parquet: its number), from 1."""

    shard: int
    offset: int
    length: int
    line: int


class Store(Protocol):
    """The records of a source."""

    path: Path
    files: tuple[Path, ...]
    unit: str  # what `Locator.line` counts

    def locators(self) -> Iterator[Locator]:
        """All records, in order. Raises UserError when a file is damaged as a whole."""

    def record(self, locator: Locator) -> Record:
        """One record; of the media that the store holds nothing is read until they are loaded. Raises SampleError."""


# First bytes of files that are often taken for text: what each is, and what to do.
FOREIGN = {
    b"\x1f\x8b": "is compressed with gzip; unpack it (gunzip)",
    b"BZh": "is compressed with bzip2; unpack it (bunzip2)",
    b"\xfd7zXZ": "is compressed with xz; unpack it (unxz)",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; unpack it (unzstd)",
    b"PK\x03\x04": "is a zip archive; unpack it",
    b"ARROW1": "is an Arrow file; write it as Parquet",
    codecs.BOM_UTF16_LE: "is text in UTF-16; save it as UTF-8",
    codecs.BOM_UTF16_BE: "is text in UTF-16; save it as UTF-8",
}
PARQUET = b"PAR1"


def open_store(path: Path, split: str) -> Store:
    """The store at `path`: a JSON or JSONL file, a Parquet file or a folder of them, a tar file or a folder of them.

    Args:
        split: train or val; decides on the shards where energon's `split.yaml` divides them.

    Raises:
        UserError: when there is none, or the kind cannot be told.
    """
    from flagscale.data.parquet import ParquetStore
    from flagscale.data.webdataset import TarStore, shards

    try:
        if not path.exists():
            raise UserError(f"data source {path}: No such file or directory; correct its path")
        if path.is_file():
            with path.open("rb") as file:
                start = file.read(8)
    except OSError as error:
        raise UserError(f"data source {path}: {error.strerror}; make it readable or correct its path") from None
    if path.is_file():
        foreign = next((what for magic, what in FOREIGN.items() if start.startswith(magic)), None)
        if foreign is not None:
            raise UserError(f"data source {path}: {foreign}")
        if path.suffix == ".parquet" or start.startswith(PARQUET):
            return ParquetStore(path, (path,))
        return TarStore(path, (path,)) if path.suffix == ".tar" else JsonStore(path)
    if not path.is_dir():
        raise UserError(f"data source {path}: is neither a file nor a folder; correct its path")
    parquet = files_below(path, ".parquet")
    return ParquetStore(path, parquet) if parquet else TarStore(path, shards(path, split))


def files_below(folder: Path, suffix: str) -> tuple[Path, ...]:
    """All files of a suffix below a folder, in order; hidden ones, such as the doubles that macOS leaves, left out."""
    found = (path for path in folder.rglob(f"*{suffix}") if path.is_file())
    return tuple(sorted(path for path in found if not any(p[0] == "." for p in path.relative_to(folder).parts)))


def natural(name: str) -> list[str | int]:
    """Key that sorts names by the numbers in them: `2.jpg` before `10.jpg`."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


class JsonStore:
    """A JSONL file, or a JSON file that is one list of objects."""

    unit = "line"

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, (path,)

    def locators(self) -> Iterator[Locator]:
        try:
            with self.path.open("rb") as file:
                is_list = file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
            yield from self._elements() if is_list else self._lines()
        except OSError as error:
            raise UserError(f"data source {self.path}: cannot be read ({error}); look after the disk") from None

    def _lines(self) -> Iterator[Locator]:
        offset = 0
        with self.path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if text.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").strip():
                    yield Locator(0, offset, len(text), number)
                offset += len(text)

    def _elements(self) -> Iterator[Locator]:
        """The elements of the file's one list; `raw_decode` finds where each ends."""
        try:
            text = self.path.read_bytes().decode()  # line ends as they are: they count in the offsets
            decoder, position = json.JSONDecoder(), text.index("[") + 1
            done, offset, line = 0, 0, 1
            while (position := _skip(text, position, " \t\r\n,")) < len(text) and text[position] != "]":
                offset += len(text[done:position].encode())
                line += text.count("\n", done, position)
                _, end = decoder.raw_decode(text, position)
                yield Locator(0, offset, len(text[position:end].encode()), line)
                # The next offset counts from this element's start.
                done, position = position, end
            if text[position:].strip() != "]":
                raise ValueError("something follows the list" if position < len(text) else "it ends without ]")
        except (ValueError, RecursionError) as error:
            raise UserError(f"data source {self.path}: is not a valid JSON list ({error}); correct the file") from None

    def record(self, locator: Locator) -> Record:
        try:
            with self.path.open("rb") as file:
                file.seek(locator.offset)
                text = file.read(locator.length)
        except OSError as error:
            raise SampleError(f"cannot be read any more ({error.strerror}); start the run again") from None
        return dataclasses.replace(parse_record(text), num_bytes=len(text))


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position
