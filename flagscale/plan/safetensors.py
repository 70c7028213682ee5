"""What a Hugging Face folder of safetensors files holds, read from their headers alone: no torch, no tensor.

Format: 8 bytes with the header's length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, the data
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.config.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its file, dtype by safetensors' name, and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def is_hf_folder(folder: Path) -> bool:
    """Whether a folder holds weights as transformers saves them."""
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def read_entries(folder: Path) -> dict[str, Entry]:
    """All tensors of a folder, by name, after a check that every file is there and whole.

    Raises:
        UserError: there are no weights, a file is missing or truncated, or index and files disagree.
    """
    if (folder / INDEX).is_file():
        expected = _read_index(folder / INDEX)
        files = sorted(set(expected.values()))
        missing = [file for file in files if not os.path.isfile(folder / file)]  # Path's raises for too long a name
        if missing:
            raise UserError(f"{folder / INDEX}: the folder lacks {', '.join(missing)}; copy what is missing")
    elif (folder / SINGLE).is_file():
        expected, files = None, [SINGLE]
    else:
        raise UserError(f"{folder}: holds neither {INDEX} nor {SINGLE}; give a folder as saved by transformers")
    entries: dict[str, Entry] = {}
    for file in files:
        entries.update(_read_header(folder / file))
    if expected is not None:
        lacking = sorted(set(expected) - set(entries))
        if lacking:
            raise UserError(
                f"{folder / INDEX}: places {lacking[0]} in {expected[lacking[0]]}, which lacks it ({len(lacking)} such "
                "tensors); copy the files again"
            )
    return entries


def _read_index(path: Path) -> dict[str, str]:
    try:
        names: Any = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is no index of safetensors files ({error!r}); copy it again") from error


def _read_header(path: Path) -> dict[str, Entry]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER + 1
        text = stream.read(length) if length <= MAX_HEADER else b""
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        entries = {
            name: Entry(path, str(entry["dtype"]), tuple(int(side) for side in entry["shape"]))
            for name, entry in header.items()
        }
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is no whole safetensors file (its header cannot be read); copy it again") from error
    if size != 8 + length + end:
        raise UserError(f"{path}: has {size} bytes, its header describes {8 + length + end}; copy it again")
    return entries
