"""`run.py -m key=a,b,c`: a run for every combination of values, each in a folder of its own, and a table at the end."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.override_parser.types import Override

from flagscale.config.errors import ConfigError, UserError
from flagscale.config.loading import Loaded
from flagscale.runner.compare import markdown, read_run, show, table_rows, write_figure
from flagscale.runner.progress import Console

_SKIP = 5
"""First iterations left out of times, as in tools/compare_runs.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One run of a sweep: its name (`key=value` of what differs), and the overrides that make it."""

    name: str
    overrides: tuple[str, ...]


def variants(overrides: Sequence[Override]) -> list[Variant]:
    """Every combination of the values of the sweeping overrides, the last one changing fastest.

    Raises:
        UserError: when no override has several values.
    """
    fixed = [str(override.input_line) for override in overrides if not override.is_sweep_override()]
    sweeps = [override for override in overrides if override.is_sweep_override()]
    if not sweeps:
        raise UserError("-m: no key has several values; write section.key=a,b,c, or leave -m out")
    choices = [[f"{_prefix(sweep)}{sweep.key_or_group}={value}" for value in _values(sweep)] for sweep in sweeps]
    found = []
    for combination in itertools.product(*choices):
        short = [re.sub(r"^\+*(\w+\.)*", "", choice) for choice in combination]
        found.append(Variant(name=",".join(short).replace("/", "_"), overrides=(*fixed, *combination)))
    names = [variant.name for variant in found]
    if len(set(names)) < len(names):
        raise UserError("-m: two runs of the sweep are the same; give each value once")
    return found


def placed(loaded: Loaded, folder: Path) -> Loaded:
    """The configuration of one run of a sweep, in a folder of its own.

    Raises:
        UserError: for a runner or action that cannot be waited for.
    """
    experiment = loaded.config.experiment
    if experiment.runner.type != "local" or experiment.runner.detach:
        raise ConfigError(
            "experiment.runner.type",
            experiment.runner.type,
            "cannot sweep: runs follow each other in the foreground on this machine",
            "set type to local and detach to false, or leave -m out",
        )
    if loaded.config.action != "run":
        raise ConfigError("action", loaded.config.action, "cannot sweep", "use action=run, or leave -m out")
    return replace(loaded, config=replace(loaded.config, experiment=replace(experiment, exp_dir=str(folder))))


def _prefix(override: Override) -> str:
    """`+` or `++` as it was written."""
    line = str(override.input_line)
    return line[: len(line) - len(line.lstrip("+"))]


def _values(override: Override) -> list[str]:
    return [str(value) for value in override.sweep_string_iterator()]


def run_all(names: Sequence[str], run: Callable[[int], int], folder: Path, console: Console) -> int:
    """Run one after the other, then compare those that ended well; the code of the first that failed, else 0.

    Args:
        run: number of a run -> its exit code; 2 and less than 128 let the others go on, a signal ends the sweep.
        folder: holds a folder for each name, and receives `compare.md` and `compare.png`.
    """
    codes: list[int] = []
    for number, name in enumerate(names):
        console.line(f"sweep: run {number + 1} of {len(names)}, {name}")
        codes.append(run(number))
        if codes[-1] > 128:
            break
    finished = [name for name, code in zip(names, codes, strict=False) if code == 0]
    if finished:
        runs = [read_run(folder / name, name) for name in finished]
        rows = table_rows(runs, _SKIP)
        show(rows)
        (folder / "compare.md").write_text(markdown(rows), encoding="utf-8")
        write_figure(runs, folder / "compare.png")
        console.line(f"sweep: {folder / 'compare.md'}, {folder / 'compare.png'}")
    for name, code in zip(names, codes, strict=False):
        if code != 0:
            console.line(f"sweep: {name} ended with exit code {code}")
    return next((code for code in codes if code != 0), 0)
