"""The mix of training sources: which there are, and the weight of each as a function of the step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flagscale.config.errors import ConfigError, UserError
from flagscale.config.schema import Config

Points = tuple[tuple[float, float], ...]
WEIGHT_FORM = "a number >= 0, or a list of [step, weight] with ascending steps"
LARGEST = 1e15  # so that sums of weights, and steps, are numbers
ONLY = "train"
"""Name of the one source that `data.train_path` is."""


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A training source: its name, its path, and the points of its weight."""

    name: str
    path: str
    weight: Points


def weight_points(value: Any) -> Points:
    """The points of a weight: `0.3`, or `[[0, 1.0], [1000, 0.2]]` for a linear ramp between them.

    Two points of one step are a jump. Before the first and after the last point the weight stays.

    Raises:
        ValueError: for anything else.
    """
    points = value if isinstance(value, list) else [[0, value]]
    if not points or not all(isinstance(p, list) and len(p) == 2 and all(map(_is_number, p)) for p in points):
        raise ValueError(f"must be {WEIGHT_FORM}")
    steps = [step for step, _ in points]
    if steps != sorted(steps) or min(steps) < 0:
        raise ValueError("has steps that do not ascend from 0 on")
    if min(weight for _, weight in points) < 0:
        raise ValueError("has a weight below 0")
    return tuple((float(step), float(weight)) for step, weight in points)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def weight_at(points: Points, step: int) -> float:
    """The weight at a step."""
    after = bisect_right([start for start, _ in points], float(step))
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (start, low), (end, high) = points[after - 1], points[after]
    return low + (high - low) * (step - start) / (end - start)


def training_sources(config: Config) -> tuple[SourceSpec, ...]:
    """The sources that training reads: `data.sources`, or `data.train_path` alone.

    Raises:
        ConfigError: when an entry is not `{path: ..., weight: ...}`, or there is no source.
    """
    data = config.data
    if not data.sources:
        if data.train_path is None:
            raise ConfigError("data.train_path", None, "must be given", "name the training data, or set data.sources")
        return (SourceSpec(ONLY, data.train_path, ((0.0, 1.0),)),)
    return tuple(_source(str(name), entry) for name, entry in data.sources.items())


def _source(name: str, entry: Any) -> SourceSpec:
    home, shape = f"data.sources.{name}", "write {path: FILE, weight: 0.5}"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str) or set(entry) - {"path", "weight"}:
        raise ConfigError(home, entry, "must have a path and may have a weight, nothing else", shape)
    try:
        return SourceSpec(name, entry["path"], weight_points(entry.get("weight", 1.0)))
    except ValueError as error:
        raise ConfigError(f"{home}.weight", entry.get("weight"), str(error), f"use {WEIGHT_FORM}") from None


def sources_are_complete(config: Config) -> Iterator[UserError]:
    """Every source has a path and a weight; at every step one of the weights is above 0."""
    try:
        sources = training_sources(config)
    except ConfigError as error:
        yield error
        return
    steps = {0, *(int(step) for source in sources for step, _ in source.weight)}
    for step in sorted(steps):
        if not any(weight_at(source.weight, step) for source in sources):
            yield ConfigError(
                "data.sources", [source.name for source in sources], f"all weights are 0 at step {step}", "raise one"
            )
            return
