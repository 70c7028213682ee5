"""Builds the index of a source: every record is read once, its media's sizes looked up, and bad samples found.

The index is a file in the cache folder (`index_file.py`). Its name holds a hash of what decides on its content
(tokenizer, image settings, policy, format) and one of the source (files, sizes, times of change), so a stale index is
never opened: a changed source or setting has another name. Samples that were skipped stand beside it in a `.bad.jsonl`
file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from flagscale.config.errors import UserError
from flagscale.data.index_file import Item, Row, index_writer
from flagscale.data.media import MediaReader
from flagscale.data.records import SampleError
from flagscale.data.source import SKIP, Source, TooLong
from flagscale.data.stores import Locator

AHEAD = 256  # records handed to the worker threads at a time


@dataclasses.dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that is not used: where it stands, and why."""

    source: str
    line: int
    id: str
    cause: str


def bad_path(index_path: Path) -> Path:
    """The file of skipped samples that belongs to an index."""
    return index_path.with_name(f"{index_path.stem}.bad.jsonl")


def build_index(source: Source, cache_path: str | Path | None = None) -> Path:
    """The path of an up-to-date index of `source`, built first when there is none.

    Any number of processes may call it at once: one builds, the others wait for it. The file appears whole or not at
    all, and is never written again, so readers may keep it mapped.

    Raises:
        UserError: naming source, line, id, cause and remedy, for the first sample that cannot be used and is not to be
            skipped; when there is no sample; when the cache folder cannot be written.
    """
    path = source.index_path(cache_path)
    if path.is_file():
        source.prepare(path)
        return path
    with _locked(path):
        if not path.is_file():
            temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
            try:
                source.prepare(path)
                bad = _write(source, temporary)
                _write_bad(path, bad)
                temporary.replace(path)
            except OSError as error:  # what cannot be read of the source is a UserError already
                raise _unwritable(path, error) from None
            finally:
                temporary.unlink(missing_ok=True)
            for stale in source.stale_files(path):
                stale.unlink(missing_ok=True)
    source.prepare(path)
    return path


def read_bad(index_path: Path) -> list[BadSample]:
    """The samples that were skipped when the index was built."""
    path = bad_path(index_path)
    if not path.is_file():
        return []
    return [BadSample(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _write_bad(path: Path, bad: list[BadSample]) -> None:
    lines = [json.dumps(dataclasses.asdict(sample), ensure_ascii=False) + "\n" for sample in bad]
    if lines:
        bad_path(path).write_text("".join(lines), encoding="utf-8")
    else:  # of an index that was removed so that this one is built
        bad_path(path).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock beside an index; the system releases it when the process dies.

    It saves work only: a file system without locks lets several builders write, each a file of its own, all alike.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(".lock").open("a")
    except OSError as error:
        raise _unwritable(path, error) from None
    with lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"data.cache_path: the index cannot be written to {path.parent} ({error.strerror}); name another folder"
    )


def _write(source: Source, path: Path) -> list[BadSample]:
    """Encode all samples of the source into an index; the ones that are skipped are returned."""
    bad: list[BadSample] = []
    with index_writer(path) as writer:
        for sample in _samples(source):
            if isinstance(sample, BadSample):
                bad.append(sample)
            else:
                writer.add(*sample)
    if bad and not writer.num_samples:
        raise UserError(f"{source.path}: all {len(bad)} samples are bad; the first, in {bad[0].line}: {bad[0].cause}")
    if not writer.num_samples:
        raise UserError(f"{source.path}: holds no sample; write one JSON object a line")
    return bad


def _samples(source: Source) -> Iterator[tuple[Row, list[Item]] | BadSample]:
    """All samples in order. Threads read the media: Pillow releases the interpreter lock where it decodes."""
    reader, locators = source.reader(), iter(source.store.locators())
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        while chunk := list(islice(locators, AHEAD)):
            yield from threads.map(lambda locator: _sample(source, reader, locator), chunk)


def _sample(source: Source, reader: MediaReader, locator: Locator) -> tuple[Row, list[Item]] | BadSample:
    """One sample's row and visual items."""
    record_id, skip = "", source.policy.on_bad_sample == SKIP
    try:
        record = source.store.record(locator)
        record_id = record.id
        shapes = [reader.shape(media) for media in record.media]
        if skip and source.policy.decode:
            for media in record.media:
                reader.verify(media)
        sample = source.encode(record, shapes)
    except SampleError as error:
        if skip or isinstance(error, TooLong):
            return BadSample(str(source.path), locator.line, record_id, f"the sample {error}")
        raise source.error(locator, record_id, error) from None
    row = Row(
        offset=locator.offset, length=locator.length, line=locator.line, first_item=0, shard=locator.shard, num_items=0,
        num_tokens=len(sample.tokens_T), num_loss_tokens=sample.num_loss_tokens,
        num_mtp_loss_tokens=sample.num_mtp_loss_tokens,
    )  # fmt: skip
    return row, [dataclasses.astuple(item) for item in sample.placements]
