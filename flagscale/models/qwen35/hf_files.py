"""Weights in Hugging Face folders: read tensor by tensor under their canonical names, and written in shards.

Files hold the experts of a layer either apart, which is the canonical form, or packed: `experts.gate_up_proj` of
[E, 2 * width, hidden] and `experts.down_proj` of [E, hidden, width].
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flagscale.config.errors import UserError
from flagscale.config.schema import ModelConfig
from flagscale.models.qwen35.canonical import canonical_shapes, check_names
from flagscale.plan.hf_config import check_hf_config
from flagscale.plan.safetensors import INDEX, SINGLE, Entry, read_entries

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
PACKED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)")
OPEN_FILES = 2  # neighbouring tensors may lie in neighbouring shards; pages of an open file count as memory


@dataclass(frozen=True, slots=True)
class Place:
    """Where a canonical tensor lies: all of a stored one, or rows of one expert in a packed one."""

    stored: str
    expert: int | None = None
    rows: slice = slice(None)


def places_of(entries: dict[str, tuple[int, ...]]) -> dict[str, Place]:
    """Canonical name -> place, for stored names with their shapes."""
    places: dict[str, Place] = {}
    for name, shape in entries.items():
        match = PACKED.fullmatch(name)
        if match is None or len(shape) != 3:
            places[name] = Place(name)
            continue
        half = shape[1] // 2
        parts = {"gate_proj": slice(0, half), "up_proj": slice(half, 2 * half)}
        if match[2] == "down_proj":
            parts = {"down_proj": slice(None)}
        for expert in range(shape[0]):
            for part, rows in parts.items():
                places[f"{match[1]}{expert}.{part}.weight"] = Place(name, expert, rows)
    return places


class HFWeights:
    """The weights of a Hugging Face folder, by canonical name. A context manager: leaving it closes the files.

    Args:
        folder: as saved by transformers; its files, names and shapes are checked here, before a tensor is read.
        model: what the weights have to fit.

    Raises:
        UserError: a file is missing or damaged, or the folder holds another model; what is missing is named.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        check_hf_config(folder, model)
        self.folder = folder
        self.entries: dict[str, Entry] = read_entries(folder)
        self.places = places_of({name: entry.shape for name, entry in self.entries.items()})
        self._open: OrderedDict[Path, Any] = OrderedDict()
        shapes = canonical_shapes(model)
        check_names(str(folder), set(self.places), set(shapes))
        for name, place in self.places.items():
            self._check_tensor(name, place, shapes[name])

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor in its file."""
        return DTYPES[self.entries[self.places[name].stored].dtype]

    def get(self, name: str) -> Tensor:
        """A tensor, as stored.

        Raises:
            UserError: the file cannot be read.
        """
        place = self.places[name]
        entry = self.entries[place.stored]
        try:
            file = self._file(entry.file)
            if place.expert is None:
                return file.get_tensor(place.stored)
            return file.get_slice(place.stored)[place.expert, place.rows]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{entry.file}: {place.stored} cannot be read ({error}); copy the file again") from error

    def _check_tensor(self, name: str, place: Place, shape: tuple[int, ...]) -> None:
        entry = self.entries[place.stored]
        if entry.dtype not in DTYPES:
            raise UserError(
                f"{entry.file}: {place.stored} is of dtype {entry.dtype}; only {', '.join(DTYPES)} can be read, "
                "take weights that are not quantised"
            )
        found = entry.shape
        if place.expert is not None:
            found = (len(range(found[1])[place.rows]), found[2])
        if found != shape:
            raise UserError(
                f"{entry.file}: {name} has shape {found}, the model has {shape}; "
                "take the model config that belongs to these weights"
            )

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            while len(self._open) >= OPEN_FILES:
                self._open.popitem(last=False)[1].__exit__(None, None, None)
            self._open[path] = safe_open(path, framework="pt", device="cpu").__enter__()
        self._open.move_to_end(path)
        return self._open[path]

    def close(self) -> None:
        """Closes the files."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ShardWriter:
    """Writes tensors into safetensors shards with an index, in the order in which they come.

    Args:
        folder: exists and is empty.
        shard_bytes: a shard is closed before it would grow beyond this; a larger tensor has a shard of its own.
    """

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._limit = folder, shard_bytes
        self._shard: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """One more tensor."""
        if self._shard and sum(value.nbytes for value in self._shard.values()) + tensor.nbytes > self._limit:
            self._flush()
        self._shard[name] = tensor.contiguous()
        self._total += tensor.nbytes

    def close(self) -> None:
        """Writes what is left, gives the shards their final names, and writes the index when there are several."""
        self._flush()
        count, weight_map = len(self._shards), {}
        for number, names in enumerate(self._shards, 1):
            file = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            (self._folder / self._part(number)).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        if self._shard:
            self._shards.append(list(self._shard))
            save_file(self._shard, self._folder / self._part(len(self._shards)), metadata={"format": "pt"})
            self._shard = {}

    @staticmethod
    def _part(number: int) -> str:
        return f"part-{number:05d}.safetensors"


def stored_form(tensors: Iterable[tuple[str, Tensor]], packed: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Canonical tensors as files hold them.

    Args:
        tensors: those of an expert, and the experts of a layer, come in order.
        packed: prefix up to `experts.` of the layers that are packed -> number of experts.
    """
    waiting: dict[str, list[Tensor]] = {}
    for name, tensor in tensors:
        match = re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)\.weight", name)
        if match is None or match[1] not in packed:
            yield name, tensor
            continue
        parts = waiting.setdefault(f"{match[1]}{match[3]}", [])
        assert len(parts) == int(match[2]), f"{name} out of order"
        parts.append(tensor)
        prefix, count = match[1], packed[match[1]]
        if match[3] == "down_proj" and len(parts) == count:
            yield prefix + "down_proj", torch.stack(waiting.pop(prefix + "down_proj"))
        halves = waiting.get(prefix + "gate_proj", []), waiting.get(prefix + "up_proj", [])
        if len(halves[0]) == len(halves[1]) == count:
            del waiting[prefix + "gate_proj"], waiting[prefix + "up_proj"]
            both = torch.cat([half for pair in zip(*halves, strict=True) for half in pair])
            yield prefix + "gate_up_proj", both.view(count, -1, both.shape[1])
    assert not waiting, sorted(waiting)
