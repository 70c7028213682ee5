"""A source of samples: its records, what turns them into tokens, and what to do with those that cannot be used."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flagscale.config.errors import UserError
from flagscale.data.chat import EncodedSample, encode_chat
from flagscale.data.media import MediaReader
from flagscale.data.parquet import ParquetStore
from flagscale.data.records import Record, SampleError
from flagscale.data.stores import Locator, open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flagscale.config.schema import Config
    from flagscale.data.chat import Shape
    from flagscale.data.image import ImageSettings
    from flagscale.data.tokenizer import Tokenizer

FORMAT = 4  # raise it when the columns, the chat template or the reading of records change
CACHE_FOLDER = ".flagscale"
RAISE, SKIP, TRUNCATE = "raise", "skip", "truncate_text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What happens to samples that cannot be used as they are.

    Attributes:
        on_bad_sample: `raise` or `skip`. To skip, every medium is decoded once when the index is built, so that all
            ranks know the same samples; to raise, headers are enough.
        on_too_long: `raise`, `skip` or `truncate_text`; over `seq_length` tokens.
        decode: whether to decode every medium when bad samples are skipped.
    """

    on_bad_sample: str = RAISE
    on_too_long: str = RAISE
    seq_length: int = 0
    decode: bool = True

    @classmethod
    def of(cls, config: Config) -> Policy:
        """The policy that a configuration states."""
        data = config.data
        return cls(
            on_bad_sample=data.on_bad_sample, on_too_long=data.on_too_long, seq_length=config.model.seq_length
        )

    @property
    def key(self) -> tuple[object, ...]:
        """What of it decides on the content of an index."""
        length = (self.on_too_long, self.seq_length) if self.on_too_long != RAISE else ()
        return (self.on_bad_sample, self.decode, *length)


class Source:
    """A file or folder of samples (`stores.py`) with what turns its records into tokens.

    Args:
        split: train or val, where the source itself is divided.
        media_root: folder that relative names of media count from; None: the source's own.

    Raises:
        UserError: when the source cannot be read.
    """

    def __init__(
        self, path: str | Path, tokenizer: Tokenizer, settings: ImageSettings, *, policy: Policy | None = None,
        split: str = "train", media_root: str | Path | None = None,
    ) -> None:  # fmt: skip
        self.path = Path(path).absolute()
        self.tokenizer = tokenizer
        self.settings = settings
        self.policy = policy or Policy()
        self.store = open_store(self.path, split)
        folder = self.path if self.path.is_dir() else self.path.parent
        self.media_root = folder if media_root is None else Path(media_root).absolute()
        self._stat = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in self.store.files]
        self._split = split

    def index_path(self, cache_path: str | Path | None) -> Path:
        """Where the index of this source, as it is now, belongs."""
        folder = self.path.parent / CACHE_FOLDER if cache_path is None else Path(cache_path).absolute()
        return folder / f"{self._prefix()}{_hash(self._stat)}.index"

    def _prefix(self) -> str:
        settings = json.dumps(dataclasses.asdict(self.settings), sort_keys=True)
        decisive = (FORMAT, str(self.path), self._split, str(self.media_root), self.tokenizer.fingerprint, settings)
        return f"{self.path.name}.{_hash(*decisive, self.policy.key)}."

    def stale_files(self, index_path: Path) -> list[Path]:
        """Index files made with the same settings of an earlier state of the source."""
        files = index_path.parent.glob(f"{glob.escape(self._prefix())}*")
        return [path for path in files if not path.name.startswith(index_path.stem)]

    def prepare(self, index_path: Path) -> None:
        """Make the records readable: Parquet rows are copied beside the index, once."""
        if isinstance(self.store, ParquetStore):
            prefix = f"{self.path.name}.{_hash(str(self.path))}."
            copy = index_path.parent / f"{prefix}{_hash(self._stat)}.rows"
            self.store.attach(copy)
            for stale in index_path.parent.glob(f"{glob.escape(prefix)}*.rows"):
                if stale != copy:
                    stale.unlink(missing_ok=True)

    def reader(self) -> MediaReader:
        """A reader of the source's media."""
        return MediaReader(self.media_root, self.settings)

    def encode(self, record: Record, shapes: Sequence[Shape]) -> EncodedSample:
        """The record's tokens, cut to `seq_length` where the policy says so. Raises SampleError."""
        encoded = encode_chat(record, shapes, self.tokenizer, self.settings.merge_size)
        length, limit = len(encoded.tokens_T), self.policy.seq_length
        if length <= limit or self.policy.on_too_long == RAISE:
            return encoded
        if self.policy.on_too_long == TRUNCATE:
            return encoded.truncated(limit, self.settings.merge_size)
        raise TooLong(f"has {length} tokens, more than model.seq_length={limit}; raise it or shorten the sample")

    def error(self, locator: Locator, record_id: str, cause: object) -> UserError:
        """The error for a sample: where it stands, and why it cannot be used."""
        name = f" (id {record_id})" if record_id else ""
        return UserError(f"{self.path} {self.store.unit} {locator.line}{name}: the sample {cause}")


class TooLong(SampleError):
    """A sample over `seq_length` tokens, to be skipped."""


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
