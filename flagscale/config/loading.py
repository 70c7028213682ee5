"""From `--config-name` and overrides to the typed configuration.

Order of precedence, key by key: schema defaults < shipped YAML < the user's YAML < command line.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flagscale.config.build import build_config
from flagscale.config.canonical import DELETED, Setting, settings_of
from flagscale.config.errors import ConfigError, UserError, UserErrors, raise_all
from flagscale.config.fields import FREE, all_fields
from flagscale.config.layers import Composer, parse_overrides
from flagscale.config.overrides import split_overrides
from flagscale.config.paths import absolute, base_folder
from flagscale.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A configuration and where its values come from.

    `history[home]` are all settings of a key from the weakest to the strongest; the last one holds. `notes` are
    remarks on what was read, for the user.
    """

    config: Config
    history: dict[str, list[Setting]]
    notes: list[str] = field(default_factory=list)

    def origin(self, home: str) -> str:
        """Where the value of a key was written; empty for a default."""
        settings = self.history.get(home)
        return settings[-1].origin if settings else ""

    def is_set(self, home: str) -> bool:
        """Whether a YAML file or the command line sets the key."""
        return home in self.history


def load(
    config_name: str,
    config_path: Path | None = None,
    overrides: Sequence[str] = (),
    cwd: Path | None = None,
) -> Loaded:
    """Compose, resolve and type a configuration.

    Args:
        config_name: YAML file without its suffix.
        config_path: folder of the user's YAML files; None for the shipped ones alone.
        overrides: command-line overrides in Hydra's grammar.
        cwd: working folder that command-line paths are relative to; the process's own by default.

    Raises:
        UserError: for every mistake in files and overrides, with file, key, value, rule and remedy.
    """
    composer = Composer(config_path)
    groups, own = split_overrides(composer, parse_overrides(overrides))
    history: dict[str, list[Setting]] = {}
    notes: list[str] = []
    errors: list[UserError] = []
    primary = None
    for layer in composer.layers(config_name, groups):
        primary = layer.path if layer.path.stem == Path(config_name).stem else primary
        tree = dict(layer.tree)
        if tree.pop("hydra", None) is not None:
            notes.append(f"{layer.path}: the section hydra has no effect here")
        try:
            for home, setting in settings_of(tree, str(layer.path)).items():
                history.setdefault(home, []).append(setting)
        except UserError as error:
            errors.append(error)
    raise_all([single for error in errors for single in getattr(error, "errors", (error,))])
    for setting in own(history):
        history.setdefault(setting.home, []).append(setting)
    history = {home: settings for home, settings in history.items() if settings[-1].value is not DELETED}
    tree = _resolved(history)
    _make_paths_absolute(tree, history, primary, cwd or Path.cwd())
    return Loaded(config=_with_origins(lambda: build_config(tree), history), history=history, notes=notes)


def _resolved(history: dict[str, list[Setting]]) -> dict[str, Any]:
    """Values nested by home, above the schema's defaults, with every `${...}` replaced by what it names."""
    tree: dict[str, Any] = {}
    for info in all_fields().values():
        if not info.required:
            _put(tree, info.home, copy.copy(info.default))
    for home, settings in history.items():
        _put(tree, home, settings[-1].value)
    config = OmegaConf.create(tree)
    for home, settings in history.items():
        if "${" not in str(settings[-1].value):
            continue
        value = settings[-1].value
        try:
            node = OmegaConf.select(config, home, throw_on_missing=True, throw_on_resolution_failure=True)
            value = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                home,
                settings[-1].value,
                f"cannot be resolved ({reason})",
                "name an existing key, or ${oc.env:NAME} for an environment variable",
                settings[-1].origin,
            ) from error
        _put(tree, home, value)
    return tree


def _put(tree: dict[str, Any], home: str, value: Any) -> None:
    *sections, name = home.split(".", FREE.count(".") + 1) if home.startswith(FREE + ".") else home.split(".")
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    tree[name] = value


def _make_paths_absolute(
    tree: dict[str, Any], history: dict[str, list[Setting]], primary: Path | None, cwd: Path
) -> None:
    for info in all_fields().values():
        if not info.path:
            continue
        *sections, name = info.home.split(".")
        place = tree
        for section in sections:
            place = place.get(section, {})
        settings = history.get(info.home)
        base = base_folder(settings[-1].source if settings else "", primary, cwd)
        if isinstance(place.get(name), str):
            place[name] = _absolute(place[name], base, info.home, settings)
        elif isinstance(place.get(name), Mapping):  # entries that hold a path each
            place[name] = {
                entry: {**value, "path": _absolute(value["path"], base, f"{info.home}.{entry}.path", settings)}
                if isinstance(value, Mapping) and isinstance(value.get("path"), str)
                else value  # left for the rules
                for entry, value in place[name].items()
            }


def _absolute(value: str, base: Path, key: str, settings: list[Setting] | None) -> str:
    try:
        return absolute(value, base)
    except ValueError as error:
        remedy = "name a file or folder, or leave the key out"
        raise ConfigError(key, value, str(error), remedy, settings[-1].origin if settings else "") from None


def _with_origins(build: Callable[[], Config], history: dict[str, list[Setting]]) -> Config:
    try:
        return build()
    except ConfigError as error:
        raise located(error, history) from None
    except UserErrors as errors:
        raise UserErrors([located(error, history) for error in errors.errors]) from None


def located(error: UserError, history: dict[str, list[Setting]]) -> UserError:
    """The error with the place where the value of its key was written."""
    if not isinstance(error, ConfigError) or error.origin or error.key not in history:
        return error
    return error.at(history[error.key][-1].origin)
