"""Where the records of a source lie, and how one of them is read without the others: JSON files and WebDataset folders.

A store finds its records once, when the index is built, and reads a record by its locator afterwards. Parquet files are
in `parquet.py`.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import yaml

from flagscale.config.errors import UserError
from flagscale.data.records import IMAGE, VIDEO, Media, Record, SampleError, medium, parse_record

META = ".nv-meta"  # energon's folder of descriptions
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

    def record(self, locator: Locator, with_media: bool) -> Record:
        """One record; media that the store holds carry their bytes only `with_media`. Raises SampleError."""


def open_store(path: Path, split: str) -> Store:
    """The store at `path`: a JSON or JSONL file, a Parquet file or a folder of them, a WebDataset folder.

    Args:
        split: train or val; decides on the shards where energon's `split.yaml` divides them.

    Raises:
        UserError: when there is none, or the kind cannot be told.
    """
    from flagscale.data.parquet import ParquetStore

    if not path.exists():
        raise UserError(f"data source {path}: No such file or directory; correct its path")
    if path.is_file():
        return ParquetStore(path, (path,)) if path.suffix == ".parquet" else JsonStore(path)
    parquet = tuple(sorted(path.rglob("*.parquet")))
    if parquet:
        return ParquetStore(path, parquet)
    return TarStore(path, split)


class JsonStore:
    """A JSONL file, or a JSON file that is one list of objects."""

    unit = "line"

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, (path,)

    def locators(self) -> Iterator[Locator]:
        with self.path.open("rb") as file:
            is_list = file.read(1024).lstrip()[:1] == b"["
        yield from self._elements() if is_list else self._lines()

    def _lines(self) -> Iterator[Locator]:
        offset = 0
        with self.path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield Locator(0, offset, len(text), number)
                offset += len(text)

    def _elements(self) -> Iterator[Locator]:
        """The elements of the file's one list; `raw_decode` finds where each ends."""
        try:
            text = self.path.read_text(encoding="utf-8")
            decoder, position = json.JSONDecoder(), text.index("[") + 1
            done, offset, line = 0, 0, 1
            while (position := _skip(text, position, " \t\r\n,")) < len(text) and text[position] != "]":
                offset += len(text[done:position].encode())
                line += text.count("\n", done, position)
                _, end = decoder.raw_decode(text, position)
                yield Locator(0, offset, len(text[position:end].encode()), line)
                done = position
                position = end
        except ValueError as error:
            raise UserError(f"data source {self.path}: is not a valid JSON list ({error}); correct the file") from None

    def record(self, locator: Locator, with_media: bool) -> Record:
        with self.path.open("rb") as file:
            file.seek(locator.offset)
            return parse_record(file.read(locator.length))


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


class TarStore:
    """A folder of WebDataset tar files, as energon and FlagScale's converters prepare it.

    A sample is the run of files of one key. `json` holds a conversation (an object in one of our forms, or the list of
    its turns); without it `txt` is the caption of the images. Media: files with the suffix of an image or a video, in
    the order of their names; or `jpgs` and `videos`, pickled lists of names or bytes.
    """

    unit = "sample"

    def __init__(self, path: Path, split: str) -> None:
        self.path = path
        self.files = self._shards(split)
        if not self.files:
            raise UserError(f"data source {path}: holds no .tar or .parquet file for the split {split!r}; correct it")

    def _shards(self, split: str) -> tuple[Path, ...]:
        """Tar files of the split: as `split.yaml` says where there is one, else all."""
        split_file = self.path / META / "split.yaml"
        if not split_file.is_file():
            return tuple(sorted(self.path.rglob("*.tar")))
        try:
            parts = yaml.safe_load(split_file.read_text(encoding="utf-8"))["split_parts"]
            names = [name for pattern in parts.get(split) or [] for name in expand_braces(str(pattern))]
        except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{split_file}: has no readable split_parts ({error}); prepare the folder again") from None
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing:
            raise UserError(f"{split_file}: names {missing[0]}, which is not in {self.path}; prepare the folder again")
        return tuple(self.path / name for name in names)

    def locators(self) -> Iterator[Locator]:
        number = 0
        for shard, path in enumerate(self.files):
            try:
                with tarfile.open(path, "r:") as tar:
                    for start, end in _runs(tar):
                        number += 1
                        yield Locator(shard, start, end - start, number)
            except (tarfile.TarError, OSError) as error:
                raise UserError(f"{path}: is not a readable tar file ({error}); replace it") from None

    def record(self, locator: Locator, with_media: bool) -> Record:
        members: dict[str, bytes | None] = {}
        key = ""
        with self.files[locator.shard].open("rb") as file:
            file.seek(locator.offset)
            try:
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    for member in tar:
                        if member.offset >= locator.offset + locator.length:
                            break
                        key, suffix = split_key(member.name)
                        wanted = with_media or suffix.rpartition(".")[2] not in IMAGE_SUFFIXES | VIDEO_SUFFIXES
                        content = tar.extractfile(member) if wanted else None
                        members[suffix] = None if content is None else content.read()
            except (tarfile.TarError, OSError) as error:
                raise SampleError(f"cannot be read from {self.files[locator.shard]} ({error}); replace it") from None
        return parse_record({"id": key, **_conversation(members)})


def _runs(tar: tarfile.TarFile) -> Iterator[tuple[int, int]]:
    """First byte and end of each run of files with the same key."""
    key, start, end = None, 0, 0
    for member in tar:
        if not member.isfile():
            continue
        name = split_key(member.name)[0]
        if name != key and key is not None:
            yield start, end
        if name != key:
            key, start = name, member.offset
        end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    if key is not None:
        yield start, end


def split_key(name: str) -> tuple[str, str]:
    """WebDataset's key and suffix of a file: `a/b.0.jpg` -> (`a/b`, `0.jpg`)."""
    folder, base = os.path.split(name)
    stem, _, suffix = base.partition(".")
    return os.path.join(folder, stem), suffix.lower()


def expand_braces(pattern: str) -> list[str]:
    """`a-{0..2}.tar` -> its three names; `{x,y}` likewise."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices: list[list[str]] = []
    for i, part in enumerate(parts):
        span = re.fullmatch(r"(\d+)\.\.(\d+)", part)
        if i % 2 and span:
            first, last = span.groups()
            choices.append([str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)])
        else:
            choices.append(part.split(",") if i % 2 else [part])
    return ["".join(chosen) for chosen in product(*choices)]


def _conversation(members: Mapping[str, bytes | None]) -> dict[str, Any]:
    """The files of a sample as the mapping that `parse_record` takes."""
    images = [medium(IMAGE, item) for item in _pickled(members, "jpgs")] + _files(members, IMAGE, IMAGE_SUFFIXES)
    videos = [medium(VIDEO, item) for item in _pickled(members, "videos")] + _files(members, VIDEO, VIDEO_SUFFIXES)
    text = next((members[name] for name in ("json", "txt") if members.get(name) is not None), None)
    if text is None:
        raise SampleError(f"has neither a json nor a txt file (files: {', '.join(sorted(members))}); prepare it again")
    try:
        data = json.loads(text) if "json" in members else text.decode()
    except ValueError as error:
        raise SampleError(f"is not valid JSON ({error}); prepare it again") from None
    if isinstance(data, str):
        turns = [{"from": "human", "value": "<image>" * len(images)}, {"from": "gpt", "value": data}]
        return {"conversations": turns, "images": images}
    data = {"conversations": data} if isinstance(data, list) else dict(data)
    seconds = data.get("second_per_grid_ts") or [None] * len(videos)
    timed = [
        Media(video.kind, video.name, video.data, video.frames, None if not second else 1 / float(second))
        for video, second in zip(videos, seconds, strict=False)
    ]
    return {**data, **({"images": images} if images else {}), **({"videos": timed} if timed else {})}


def _files(members: Mapping[str, bytes | None], kind: str, suffixes: frozenset[str]) -> list[Media]:
    """Media stored as files of their own, `2.jpg` before `10.jpg`."""
    names = [name for name in members if name.rpartition(".")[2] in suffixes]
    names.sort(key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])
    return [Media(kind, name, members[name]) for name in names]


class _PlainUnpickler(pickle.Unpickler):
    """Lists, texts and bytes only: a pickle from elsewhere must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")


def _pickled(members: Mapping[str, bytes | None], name: str) -> list[Any]:
    """The list in a pickled file of the sample; empty when there is none."""
    data = members.get(name)
    if data is None:
        return []
    try:
        value = _PlainUnpickler(BytesIO(data)).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise SampleError(f"has '{name}' that is no pickled list of names or bytes ({error})") from None
    if not isinstance(value, list):
        raise SampleError(f"has '{name}' that is a pickled {type(value).__name__}, not a list; prepare it again")
    return value
