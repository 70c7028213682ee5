"""One YAML file (or command line) as settings at their homes.

Users group keys as FlagScale does: `system.precision.bf16`, `train.model.seq_length`, `model.lr`. Here every value
moves to the one home of its key, and keeps where it was written for messages and `action=explain`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flagscale.config.errors import ConfigError, UserError, raise_all
from flagscale.config.fields import find_home, is_section, nearest
from flagscale.config.secrets import shown

COMMAND_LINE = "command line"
DELETED = object()
"""Value of a setting that gives a key its default back (`~key` on the command line)."""
_INTERPOLATION = re.compile(r"\$\{(\.*)([A-Za-z_][\w.]*)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A value given to a key: its home, the value, the name as it was written, and the file."""

    home: str
    value: Any
    written: str
    source: str

    @property
    def origin(self) -> str:
        """For messages: the file, and the name as written when it differs from the home."""
        return self.source if self.written == self.home else f"written as {self.written} in {self.source}"


def settings_of(tree: Mapping[str, Any], source: str) -> dict[str, Setting]:
    """The settings that a file makes, by home.

    Raises:
        ConfigError, UserErrors: unknown keys, and keys given twice in the file with different values.
    """
    settings: dict[str, Setting] = {}
    errors: list[UserError] = []
    for path, value in _leaves(tree, ()):
        home = find_home(path)
        written = ".".join(path)
        if home is None:
            errors.append(unknown_key(path, value, source))
            continue
        setting = Setting(home=home, value=_at_home(value, path), written=written, source=source)
        other = settings.setdefault(home, setting)
        # Compared with itself, nan would be two values.
        if other is not setting and (other.value != setting.value or type(other.value) is not type(setting.value)):
            errors.append(given_twice(other, setting))
    raise_all(errors)
    return settings


def unknown_key(path: tuple[str, ...], value: Any, source: str) -> ConfigError:
    """The error for a name that is no key, with the names most like it."""
    if is_section(path):
        return ConfigError(
            ".".join(path), value, "is a section of keys, no key itself", "write its keys below it", source
        )
    close = nearest(path) or difflib.get_close_matches(".".join(path), ("defaults",))  # Hydra's own, in no schema
    remedy = f"nearest known keys: {', '.join(close)}" if close else "`run.py action=explain key=model` lists a section"
    return ConfigError(".".join(path), value, "is no known key", remedy, source)


def given_twice(first: Setting, second: Setting) -> ConfigError:
    """The error for one key with two values, naming both places."""
    places = " and ".join(
        f"{setting.written} = {shown(setting.home, setting.value)!r} ({setting.source})" for setting in (first, second)
    )
    return ConfigError(first.home, shown(second.home, second.value), f"is given twice: {places}", "keep one of them")


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        here = (*path, str(name))
        if isinstance(value, Mapping) and (is_section(here) or find_home(here) is None) and value:
            yield from _leaves(value, here)
        elif not (is_section(here) and (value is None or value == {})):  # a section without keys sets nothing
            yield here, value


def _at_home(value: Any, path: tuple[str, ...]) -> Any:
    """`value` with its `${...}` references pointing to the homes of the keys they name."""
    if isinstance(value, list):
        return [_at_home(item, path) for item in value]
    if isinstance(value, Mapping):
        return {name: _at_home(item, (*path, str(name))) for name, item in value.items()}
    if not isinstance(value, str) or "${" not in value:
        return value

    def move(match: re.Match[str]) -> str:
        dots, name = match.groups()
        target = tuple(name.split("."))
        if dots:
            target = (*path[: max(0, len(path) - len(dots))], *target)
        return "${" + (find_home(target) or ".".join(target)) + "}"

    return _INTERPOLATION.sub(move, value)
