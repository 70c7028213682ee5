"""YAML files in the order in which they apply, through Hydra's defaults lists.

This is the only file that touches Hydra's internals. Hydra finds files on the search path and expands defaults lists;
merging is done key by key in `loading.py`, because two files may write one key in different sections.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flagscale.config.errors import UserError

_OTHER_BASES = {
    60: re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"),  # YAML 1.1 takes `4:00:00` for 14400
    8: re.compile(r"[-+]?0[0-7_]*[0-7]"),  # and `010` for 8
}
BASE = "qwen35_mimo"
"""Shipped configuration beneath a YAML file that has no defaults list of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One YAML file as it applies: its path and its content, embedded in the package where Hydra puts it."""

    path: Path
    tree: dict[str, Any]


def shipped_folder() -> Path:
    """The folder of shipped configurations: `configs/` of a checkout, or its copy inside an installed package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_configs"
    return installed if installed.is_dir() else package.parent / "configs"


class Composer:
    """Reads YAML files by configuration name.

    Args:
        folder: folder of the user's YAML files, searched before the shipped one; None for the shipped one alone.

    Raises:
        UserError: when the folder does not exist.
    """

    def __init__(self, folder: Path | None) -> None:
        version.setbase("1.3")
        Plugins.instance()
        self.folders = [shipped_folder()]
        if folder is not None and folder.resolve() != self.folders[0]:
            if not folder.is_dir():
                raise UserError(f"--config-path {folder}: no such folder; give the folder that holds the YAML file")
            self.folders.insert(0, folder.resolve())
        search_path = ConfigSearchPathImpl()
        for place in self.folders:
            search_path.append("flagscale", f"file://{place}")
        search_path.append("schema", "structured://")
        self.repository = ConfigRepository(search_path)

    def is_group(self, name: str) -> bool:
        """Whether `name` is a folder of alternatives, such as `model`."""
        return bool(self.repository.group_exists(name))

    def groups(self) -> list[str]:
        """Names of all groups of alternatives."""
        return sorted({path.name for place in self.folders for path in place.iterdir() if path.is_dir()})

    def choices(self, group: str) -> list[str]:
        """Names of the files of a group."""
        return sorted({path.stem for place in self.folders for path in (place / group).glob("*.yaml")})

    def names(self) -> list[str]:
        """Configurations that --config-name can choose, the user's own first."""
        found = [path.stem for place in self.folders for path in sorted(place.glob("*.yaml"))]
        return list(dict.fromkeys(found))

    def layers(self, name: str, groups: Sequence[Override] = ()) -> list[Layer]:
        """The files that `name` composes, first to last; a later one wins. `groups` choose among alternatives.

        A file without a defaults list goes on top of the shipped default configuration.

        Raises:
            UserError: unknown name or group choice, YAML that cannot be read, a defaults list that cannot be expanded.
        """
        name = name.removesuffix(".yaml")
        if not self.repository.config_exists(name):
            raise UserError(
                f"--config-name {name}: no such file in {' or '.join(map(str, self.folders))}; "
                f"available: {', '.join(self.names()) or 'none'}"
            )
        if self._has_defaults(name):
            return self._expanded(name, groups)
        alone = self._expanded(name, ())
        return alone if name == BASE else self._expanded(BASE, groups) + alone

    def _has_defaults(self, name: str) -> bool:
        loaded = self._load(name)
        return loaded is not None and bool(loaded.defaults_list)

    def _expanded(self, name: str, groups: Sequence[Override]) -> list[Layer]:
        try:
            with warnings.catch_warnings():
                # Hydra warns of a list without `_self_`, which stands at its end then, as everybody expects.
                warnings.simplefilter("ignore", UserWarning)
                entries = create_defaults_list(
                    self.repository, name, list(groups), prepend_hydra=False, skip_missing=False
                )
        except RecursionError as error:
            raise UserError(
                f"{name}.yaml: its defaults list leads back to itself; rename the file or the entry"
            ) from error
        except yaml.YAMLError as error:
            raise UserError(self._syntax_message(error, name)) from error
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise UserError(f"{name}.yaml: {_plain(str(error))}") from error
        layers = []
        for entry in entries.defaults:
            assert entry.config_path is not None
            loaded = self._load(entry.config_path)
            if loaded is None:
                continue
            tree = OmegaConf.to_container(loaded.config, resolve=False)
            if not isinstance(tree, dict):
                raise UserError(
                    f"{self._path(entry.config_path)}: must hold keys and values, not {type(tree).__name__}"
                )
            for part in reversed([part for part in (entry.package or "").split(".") if part not in ("", "_global_")]):
                tree = {part: tree}
            layers.append(Layer(path=self._path(entry.config_path), tree=tree))  # type: ignore[arg-type]
        return layers

    def _load(self, name: str) -> Any:
        try:
            loaded = self.repository.load_config(name)
        except RecursionError as error:
            raise UserError(f"{self._path(name)}: an alias stands inside what it names; write the value out") from error
        except yaml.YAMLError as error:
            raise UserError(self._syntax_message(error, name)) from error
        except UnicodeDecodeError as error:
            raise UserError(f"{self._path(name)}: is no UTF-8 text ({error.reason}); save it as UTF-8") from error
        except OSError as error:
            raise UserError(f"{self._path(name)}: {error.strerror or error}; a readable YAML file is needed") from error
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise UserError(f"{self._path(name)}: {_plain(str(error))}") from error
        self._require_base_10(self._path(name))
        return loaded

    def _require_base_10(self, path: Path) -> None:
        """No number is written like a time or with a leading zero, which YAML 1.1 reads to another base."""
        text = path.read_text(encoding="utf-8-sig") if path.is_file() else ""
        if not any(form.search(text) for form in _OTHER_BASES.values()):
            return
        for event in yaml.parse(text):
            if not isinstance(event, yaml.ScalarEvent) or not event.implicit[0]:
                continue
            for base, form in _OTHER_BASES.items():
                if form.fullmatch(event.value):
                    raise UserError(
                        f"{path}, line {event.start_mark.line + 1}: {event.value} is a number to the base of {base} in "
                        "YAML; write one decimal number in the unit of the key, or text in quotes"
                    )

    def _path(self, name: str) -> Path:
        file = f"{name.removesuffix('.yaml')}.yaml"
        return next((place / file for place in self.folders if (place / file).is_file()), Path(file))

    def _syntax_message(self, error: yaml.YAMLError, name: str) -> str:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        file = mark.name if mark and mark.name.startswith("/") else self._path(name)
        problem = _plain(getattr(error, "problem", None) or str(error))
        return f"{file}{place}: is no valid YAML: {problem}; check indentation, colons and quotes there"


def parse_overrides(lines: Sequence[str], *, sweep: bool = False) -> list[Override]:
    """Command-line overrides in Hydra's grammar.

    Args:
        sweep: whether an override may give several values.

    Raises:
        UserError: for text that is no override.
    """
    parser, parsed = OverridesParser.create(), []
    for line in lines:
        try:
            override = parser.parse_overrides([line])[0]
        except HydraException as error:
            detail = str(error).splitlines()[0]
            raise UserError(
                f"command line {line!r}: is no override ({detail}); write section.key=value, and quote values with "
                "special characters"
            ) from error
        if override.is_sweep_override() and not sweep:
            raise UserError(
                f"command line {line!r}: gives several values for one run; write a list as key=[a,b], quote the text, "
                "or add -m for a run with each value"
            )
        parsed.append(override)
    return parsed


def _plain(message: str) -> str:
    """A message of Hydra on one line, without the search path at its end."""
    return re.sub(r"\s*\n\s*", " ", message.partition("Config search path:")[0].strip()).replace("\t", " ")
