"""Changes of the mix of sources while a run goes on, through a file: `exp_dir/mix.yaml`, source -> weight.

Rank 0 looks at the file before every step and tells the others, so all change at the same step. Every change is
written to `exp_dir/mix.jsonl` with its step: a run resumed from an older checkpoint makes it again at that step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from flagscale.config.mix import Points, weight_at, weight_points
from flagscale.data.loader import DataPipeline

CONTROL, JOURNAL = "mix.yaml", "mix.jsonl"


class MixControl:
    """The changes of one run's mix.

    Args:
        exp_dir: holds the control file and the journal.
        data: the training pipeline; its state is that of `first_step`.
        first_step: the step that the run starts or resumes with.
    """

    def __init__(self, exp_dir: Path, data: DataPipeline, first_step: int) -> None:
        self._control, self._journal = exp_dir / CONTROL, exp_dir / JOURNAL
        self._data = data
        self._names = data.corpus.names
        self._entries = self._read_journal() if self._is_reader else []
        self._first_step = first_step
        self._seen = self._entries[-1]["text"] if self._entries else ""

    @property
    def _is_reader(self) -> bool:
        return len(self._names) > 1 and dist.get_rank() == 0

    def poll(self, step: int) -> list[str]:
        """Applies what is to change before this step; the lines to report, on rank 0. Collective over the world."""
        if len(self._names) == 1:
            return []
        found: list[Any] = [None]
        lines: list[str] = []
        if self._is_reader:
            found[0] = self._journaled(step)
            lines = self._look(step, found)
        dist.broadcast_object_list(found, src=0)
        if found[0] is not None:
            self._data.change_mix(step, {name: _points(points) for name, points in found[0].items()})
            lines.append(f"mix from iteration {step + 1} on: {self._shown(found[0], step)}")
        return lines if self._is_reader else []

    def _journaled(self, step: int) -> dict[str, Points] | None:
        """The change that an earlier run made at this step, after the checkpoint this one goes on from."""
        again = [entry for entry in self._entries if entry["step"] == step >= self._first_step]
        return again[-1]["weights"] if again else None

    def _look(self, step: int, found: list[Any]) -> list[str]:
        """Puts a new content of the control file into `found` and the journal; lines about one that is not usable."""
        try:
            text = self._control.read_bytes().decode(errors="replace")
        except OSError:
            return []
        if text == self._seen or not text.strip():  # empty is what an editor leaves while it writes
            return []
        self._seen = text
        try:
            weights = self._parsed(text, step)
        except ValueError as error:
            return [f"{self._control}: {error}; the mix stays as it is"]
        found[0] = weights
        # A change at an earlier step than journaled ones replaces them.
        self._entries = [entry for entry in self._entries if entry["step"] < step]
        self._entries.append({"step": step, "weights": weights, "text": text})
        temporary = self._journal.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(entry) + "\n" for entry in self._entries), encoding="utf-8")
        temporary.replace(self._journal)
        return []

    def _parsed(self, text: str, step: int) -> dict[str, Points]:
        """Weights by source, to count from a step on. Raises ValueError, saying what is wrong."""
        try:
            tree = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"is not valid YAML ({getattr(error, 'problem', error)})") from None
        if not isinstance(tree, dict) or not tree:
            raise ValueError("is no mapping of sources to weights")
        unknown = sorted(str(name) for name in tree if name not in self._names)
        if unknown:
            raise ValueError(f"names {', '.join(unknown)}; sources are {', '.join(self._names)}")
        weights = {}
        for name, value in tree.items():
            try:
                weights[name] = weight_points(value)
            except ValueError as error:
                raise ValueError(f"{name} {error}") from None
        empty = self._data.first_empty_mix(step, weights)
        if empty is not None:
            raise ValueError(f"leaves every source with weight 0 at step {empty}")
        return weights

    def _read_journal(self) -> list[dict[str, Any]]:
        if not self._journal.is_file():
            return []
        return [json.loads(line) for line in self._journal.read_text(encoding="utf-8").splitlines()]

    def _shown(self, weights: dict[str, Any], step: int) -> str:
        return ", ".join(f"{name} {weight_at(_points(points), step):g}" for name, points in weights.items())


def _points(points: Any) -> Points:
    """Points as JSON gives them, as points."""
    return tuple((float(step), float(weight)) for step, weight in points)
