"""The schema as a table: every key by its home, and the homes of every short name."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from dataclasses import dataclass
from typing import Any

from flagscale.config.schema import Config

SECTIONS = ("system", "model", "data")
"""Sections that are groupings only: a key homed in one of them is understood in all three."""
GROUPINGS = ("optimizer", "lr_scheduler", "precision", "logging", "checkpoint")
"""Groupings inside a section that may be written or left out."""
FREE = "experiment.envs"
"""The one key whose content is the user's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldInfo:
    """One configuration key."""

    home: str
    annotation: Any
    default: Any
    """`dataclasses.MISSING` when the user must give the key."""
    meaning: str
    unit: str
    choices: tuple[str, ...]
    minimum: float | None
    path: bool

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is dataclasses.MISSING


@functools.cache
def all_fields() -> dict[str, FieldInfo]:
    """Every key of the schema by its dotted home, in the order of the schema."""
    return {info.home: info for info in _walk(Config, "")}


def nested(cls: type) -> dict[str, type]:
    """The sub-sections of a section: name -> dataclass."""
    hints = type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if dataclasses.is_dataclass(hints[f.name])}


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    """Resolved annotations of a schema class."""
    return typing.get_type_hints(cls)


def _walk(cls: type, prefix: str) -> list[FieldInfo]:
    found, sections = [], nested(cls)
    for field in dataclasses.fields(cls):
        home = f"{prefix}{field.name}"
        if field.name in sections:
            found += _walk(sections[field.name], home + ".")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found.append(FieldInfo(home=home, annotation=type_hints(cls)[field.name], default=default, **field.metadata))
    return found


@functools.cache
def short_names() -> dict[str, str]:
    """Short name -> home, of the keys of `system`, `model` and `data`.

    The short name of a key is its path inside the section without the groupings: `lr` for `model.optimizer.lr`, but
    `tokenizer.type` for `data.tokenizer.type`.
    """
    names: dict[str, str] = {}
    for home in all_fields():
        section, *path = home.split(".")
        if section in SECTIONS:
            short = ".".join(part for part in path if part not in GROUPINGS)
            assert short not in names, f"{home} and {names[short]} share the short name {short}"
            names[short] = home
    return names


def find_home(path: tuple[str, ...]) -> str | None:
    """Home of the key that was written at `path`, or None when no key is understood there.

    `("train", "system", "precision", "bf16")` -> `system.bf16`; keys outside `system`, `model` and `data` are known
    at their home only.
    """
    dotted = ".".join(path)
    if dotted in all_fields() or dotted.startswith(FREE + "."):
        return dotted
    short = _short_name(path)
    return None if short is None else short_names().get(short)


def is_section(path: tuple[str, ...]) -> bool:
    """Whether a mapping at `path` groups keys, rather than being the value of one."""
    short = _short_name(path)
    if short is not None:
        return not short or any(name.startswith(short + ".") for name in short_names())
    dotted = ".".join(path)
    return dotted == FREE or any(home.startswith(dotted + ".") for home in all_fields())


def _short_name(path: tuple[str, ...]) -> str | None:
    """What is left of a path without `train`, section and groupings; None for one outside of them."""
    inner = path[1:] if path[0] == "train" else path
    if inner and inner[0] in SECTIONS:
        inner = inner[1:]
    elif path[0] != "train":
        return None
    return ".".join(part for part in inner if part not in GROUPINGS)


def nearest(path: tuple[str, ...], count: int = 3) -> list[str]:
    """Homes of the keys most like the unknown one at `path`, best first; empty when nothing is like it."""
    by_leaf: dict[str, list[str]] = {}
    for home in all_fields():
        by_leaf.setdefault(home.rsplit(".", 1)[-1], []).append(home)
    leaves = difflib.get_close_matches(path[-1], by_leaf, n=count, cutoff=0.6)
    found = [home for leaf in leaves for home in by_leaf[leaf]]
    found += difflib.get_close_matches(".".join(path), all_fields(), n=count, cutoff=0.75)
    return list(dict.fromkeys(found))[:count]
