"""WebDataset tar files as a store of records, as energon and FlagScale's converters prepare them."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from flagscale.config.errors import UserError
from flagscale.data.records import IMAGE, VIDEO, Media, Record, SampleError, medium, parse_record
from flagscale.data.stores import IMAGE_SUFFIXES, VIDEO_SUFFIXES, Locator, files_below, natural

META = ".nv-meta"  # energon's folder of descriptions


class TarStore:
    """Tar files of samples.

    A sample is the run of files of one key. `json` holds a conversation (an object in one of our forms, or the list of
    its turns); without it `txt` is the caption of the media, or a document. Media: files with the suffix of an image or
    a video, in the order of their names; or `jpgs` and `videos`, pickled lists of names or bytes.
    """

    unit = "sample"

    def __init__(self, path: Path, files: tuple[Path, ...]) -> None:
        self.path, self.files = path, files

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

    def record(self, locator: Locator) -> Record:
        path = self.files[locator.shard]
        found, size = _members(path, locator)
        cut = next((member.name for member in found.values() if member.offset_data + member.size > size), None)
        if cut is not None:
            raise SampleError(f"has the file {cut}, in which {path} ends; replace that file or remove the sample")
        members = {suffix: partial(_read_span, path, m.offset_data, m.size) for suffix, m in found.items()}
        texts = [member.size for suffix, member in found.items() if not _is_media(suffix)]
        key = split_key(next(iter(found.values())).name)[0]
        record = parse_record({"id": key, **_conversation(members)})
        return dataclasses.replace(record, num_bytes=sum(texts) + tarfile.BLOCKSIZE * len(found))


def _members(path: Path, locator: Locator) -> tuple[dict[str, tarfile.TarInfo], int]:
    """The files of a sample by suffix, and the size of the tar file. Raises SampleError."""
    found: dict[str, tarfile.TarInfo] = {}
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(locator.offset)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in _listed(tar):
                    if member.offset >= locator.offset + locator.length:
                        break
                    key, suffix = split_key(member.name)
                    if found.setdefault(suffix, member) is not member:
                        raise SampleError(f"has two files {key}.{suffix} in {path}; rename one")
    except (tarfile.TarError, OSError) as error:
        raise SampleError(f"cannot be read from {path} ({error}); replace the file") from None
    if not found:
        raise SampleError(f"is not in {path} any more; start the run again")
    return found, size


def _listed(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The files in it, up to where it breaks off. Raises tarfile.ReadError when there is none."""
    members, count = iter(tar), 0
    while True:
        try:
            member = next(members, None)
        except tarfile.ReadError:
            if not count:
                raise
            return
        if member is None:
            return
        if member.isfile():
            count += 1
            yield member


def shards(folder: Path, split: str) -> tuple[Path, ...]:
    """Tar files of a split: as energon's `split.yaml` (or `.json`) says where there is one, else all.

    Raises:
        UserError: when the description cannot be used, or leaves no file.
    """
    described = (folder / META / f"split.{suffix}" for suffix in ("yaml", "json"))
    split_file = next((file for file in described if file.is_file()), None)
    if split_file is None:
        files = files_below(folder, ".tar")
    else:
        try:
            stated = yaml.safe_load(split_file.read_text(encoding="utf-8"))
            names, excluded = _expanded(stated["split_parts"].get(split)), _expanded(stated.get("exclude"))
        except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{split_file}: has no readable split_parts ({error}); prepare the folder again") from None
        single = next((name for name in excluded if not name.endswith(".tar")), None)
        if single is not None:
            raise UserError(f"{split_file}: excludes {single}, but single samples stay; exclude the whole tar file")
        names = [name for name in names if name not in excluded]
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{split_file}: names {missing[0]}, which is not in {folder}; prepare the folder again")
        files = tuple(folder / name for name in names)
    if not files:
        others = [*files_below(folder, ".jsonl"), *files_below(folder, ".json")]
        remedy = f"name a file in it, such as {others[0]}" if others else "correct it"
        raise UserError(f"data source {folder}: holds no .tar or .parquet file for the split {split!r}; {remedy}")
    return files


def _expanded(patterns: Any) -> list[str]:
    """The names that a list of patterns stands for."""
    return [name for pattern in patterns or [] for name in expand_braces(str(pattern))]


def _read_span(path: Path, start: int, size: int) -> bytes:
    """A file of a sample. Raises SampleError when it is not there whole."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(size)
    except OSError as error:
        raise SampleError(f"cannot be read from {path} ({error.strerror}); replace the file") from None
    if len(data) < size:
        raise SampleError(f"cannot be read from {path} (it ends early); replace the file")
    return data


def _is_media(suffix: str) -> bool:
    """Whether a file of a sample is an image or a video."""
    return suffix.rpartition(".")[2] in IMAGE_SUFFIXES | VIDEO_SUFFIXES


def _runs(tar: tarfile.TarFile) -> Iterator[tuple[int, int]]:
    """First byte and end of each run of files with the same key; the last one may be cut off.

    Raises:
        tarfile.ReadError: when there is no readable file in it at all.
    """
    key, start, end = None, 0, 0
    for member in _listed(tar):
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


Members = Mapping[str, Callable[[], bytes]]
"""The files of a sample: suffix -> what reads it."""


def _conversation(members: Members) -> dict[str, Any]:
    """The files of a sample as the mapping that `parse_record` takes."""
    images = [medium(IMAGE, item) for item in _pickled(members, "jpgs")] + _files(members, IMAGE, IMAGE_SUFFIXES)
    videos = [medium(VIDEO, item) for item in _pickled(members, "videos")] + _files(members, VIDEO, VIDEO_SUFFIXES)
    kind = next((name for name in ("json", "txt") if name in members), None)
    if kind is None:
        raise SampleError(f"has neither a json nor a txt file (files: {', '.join(sorted(members))}); prepare it again")
    try:
        data = json.loads(members[kind]()) if kind == "json" else members[kind]().decode()
    except (ValueError, RecursionError) as error:
        raise SampleError(f"has a {kind} file that is not valid ({error}); prepare it again") from None
    if isinstance(data, str):
        return {"text": data, "images": images, "videos": videos}
    if not isinstance(data, list | dict):
        raise SampleError(f"has a json file that holds a {type(data).__name__}; it must be an object or its turns")
    data = {"conversations": data} if isinstance(data, list) else data
    timed = _timed(videos, data.get("second_per_grid_ts") or [])
    return {**data, **({"images": images} if images else {}), **({"videos": timed} if timed else {})}


def _timed(videos: Sequence[Media], seconds: Any) -> list[Media]:
    """The videos with their rates, where FlagScale's converter noted the seconds of a frame group."""
    try:
        rates = [None if not one else 1 / float(one) for one in seconds]
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise SampleError(f"has second_per_grid_ts that is no list of numbers ({error}); prepare it again") from None
    rates += [None] * (len(videos) - len(rates))
    return [dataclasses.replace(video, fps=rate) for video, rate in zip(videos, rates, strict=False)]


def _files(members: Members, kind: str, suffixes: frozenset[str]) -> list[Media]:
    """Media stored as files of their own, `2.jpg` before `10.jpg`."""
    names = sorted((name for name in members if name.rpartition(".")[2] in suffixes), key=natural)
    return [Media(kind, name, members[name]) for name in names]


class _PlainUnpickler(pickle.Unpickler):
    """Lists, texts and bytes only: a pickle from elsewhere must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")


def _pickled(members: Members, name: str) -> list[Any]:
    """The list in a pickled file of the sample; empty when there is none."""
    if name not in members:
        return []
    data = members[name]()
    try:
        value = _PlainUnpickler(BytesIO(data)).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise SampleError(f"has '{name}' that is no pickled list of names or bytes ({error})") from None
    if not isinstance(value, list):
        raise SampleError(f"has '{name}' that is a pickled {type(value).__name__}, not a list; prepare it again")
    return value
