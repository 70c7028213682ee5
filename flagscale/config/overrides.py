"""Command-line overrides: which choose a group, and which set a key.

`group=choice` goes to Hydra's defaults list. `section.key=value` sets any known key wherever it is homed, whether a
YAML file has it or not; `++` means the same; `+` adds a key that is not set yet; `~key` gives it its default back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from flagscale.config.canonical import COMMAND_LINE, DELETED, Setting, given_twice, settings_of, unknown_key
from flagscale.config.errors import UserError, raise_all
from flagscale.config.fields import all_fields, find_home, is_section, nearest
from flagscale.config.layers import Composer

Settings = Callable[[dict[str, list[Setting]]], list[Setting]]


def split_overrides(composer: Composer, overrides: Sequence[Override]) -> tuple[list[Override], Settings]:
    """(overrides that choose groups, a function from the files' settings to the settings of the other overrides)."""
    groups = [override for override in overrides if _chooses_group(composer, override)]
    raise_all([_no_choice(composer, override) for override in groups if not _is_choice(override)])
    keys = [override for override in overrides if not _chooses_group(composer, override)]
    return groups, lambda history: _settings(keys, history, composer.groups())


def _chooses_group(composer: Composer, override: Override) -> bool:
    if override.package is not None or "/" in override.key_or_group:
        return True
    return not isinstance(override.value(), dict) and composer.is_group(override.key_or_group)


def _is_choice(override: Override) -> bool:
    return override.is_delete() or isinstance(override.value(), str | list)


def _no_choice(composer: Composer, override: Override) -> UserError:
    """The error for a group that is given a number or nothing where a name belongs, as in `runner=4`."""
    name = override.key_or_group
    if not name:
        return UserError(f"command line {override.input_line!r}: names no key; write section.key=value")
    choices = ", ".join(composer.choices(name))
    remedy = f"choose one of {choices}" if choices else f"groups: {', '.join(composer.groups())}"
    return UserError(f"command line {override.input_line!r}: a group takes the name of one of its files; {remedy}")


def _settings(overrides: Sequence[Override], history: dict[str, list[Setting]], groups: Sequence[str]) -> list[Setting]:
    """Settings of the command line, in its order.

    Raises:
        UserError: unknown key, one key given twice with different values, `+` on a key that a file sets otherwise.
    """
    found: dict[str, Setting] = {}
    errors: list[UserError] = []
    for override in overrides:
        if "." not in override.key_or_group and not is_known(override.key_or_group):
            errors.append(_unknown_alone(override, groups))
            continue
        for setting in _of_override(override, errors):
            other = found.setdefault(setting.home, setting)
            if other is not setting and other.value != setting.value:
                errors.append(given_twice(other, setting))
            files = history.get(setting.home)
            if override.is_add() and files and files[-1].value != setting.value:
                errors.append(given_twice(files[-1], setting))
    raise_all(errors)
    return list(found.values())


def is_known(name: str) -> bool:
    """Whether a name without dots is a section or a key of its own, such as `action`."""
    return is_section((name,)) or find_home((name,)) is not None


def _unknown_alone(override: Override, groups: Sequence[str]) -> UserError:
    """The error for `name=value` where `name` is neither group nor section: perhaps a group, perhaps a bare key."""
    name = override.key_or_group
    keys = nearest((name,))
    hint = f"nearest known keys: {', '.join(keys)}; " if keys else ""
    return UserError(
        f"command line {override.input_line!r}: {name} is no group and no key; {hint}groups: {', '.join(groups)}"
    )


def _of_override(override: Override, errors: list[UserError]) -> list[Setting]:
    path = tuple(override.key_or_group.split("."))
    try:
        if override.is_delete():
            home = find_home(path)
            if home is None:
                raise unknown_key(path, None, COMMAND_LINE)
            return [Setting(home=home, value=DELETED, written=override.key_or_group, source=COMMAND_LINE)]
        tree: Any = _value(override, find_home(path))
        for name in reversed(path):
            tree = {name: tree}
        return list(settings_of(tree, COMMAND_LINE).values())
    except UserError as error:
        errors.extend(getattr(error, "errors", (error,)))
        return []


def _value(override: Override, home: str | None) -> Any:
    """The value in the type Hydra's grammar gives it, but the text as typed for a key that takes text."""
    value = override.value()
    info = all_fields().get(home or "")
    if info and info.annotation in (str, str | None) and isinstance(value, bool | int | float):
        return (override.input_line or "").split("=", 1)[1]
    return value
