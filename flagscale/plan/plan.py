"""The experiment plan: everything a run needs to know, decided before a process starts.

The plan is written to `exp_dir/plan.json`, the one file that the trainer receives. It is a value: `load(save(plan))`
equals `plan`, and nothing in it is recomputed on a rank.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flagscale.config.build import build_config
from flagscale.config.errors import UserError
from flagscale.config.schema import Config
from flagscale.plan.layout import AXES, LANGUAGE, VISION, Grid

Layout = Literal["unified", "colocated"]
GROUP_AXES = (*((axis,) for axis in AXES), ("tp", "cp"), ("tp", "pp"), ("dp", "cp"))
"""Families of process groups whose rank lists the plan file shows; `ep` is added to them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """How a global batch is cut.

    `macro_batches[k]` is the number of microbatches that the k-th vision forward of a step serves; they add up to
    `num_microbatches`, and all but the last equal `vit_batch_factor` (or the one there is, when it is smaller).
    """

    micro_batch_size: int
    vision_micro_batch_size: int
    global_batch_size: int
    vit_batch_factor: int
    num_microbatches: int
    macro_batches: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCost:
    """Size and work of one part of the model."""

    parameters: int
    flops_per_step: float
    """Model FLOPs of forward and backward of a global batch; for vision at the image size the plan assumes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Estimated bytes on the rank that holds most, by kind."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All kinds together, bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentPlan:
    """A checked configuration and what follows from it.

    `costs` has the parts vision (without its merger), merger, language (with embedding and output layer) and mtp.
    `command` is the torchrun command as an argument list.
    """

    config: Config
    layout: Layout
    world_size: int
    modules: dict[str, Grid]
    batch: BatchPlan
    costs: dict[str, ModuleCost]
    memory: MemoryPlan
    command: tuple[str, ...]

    @property
    def vision(self) -> Grid:
        """Grid of the vision encoder."""
        return self.modules[VISION]

    @property
    def language(self) -> Grid:
        """Grid of the language model."""
        return self.modules[LANGUAGE]

    @property
    def exp_dir(self) -> Path:
        """Folder of the run, absolute."""
        return Path(self.config.experiment.exp_dir)

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of a step over all modules."""
        return sum(cost.flops_per_step for cost in self.costs.values())

    @property
    def vision_balance(self) -> str:
        """How far an image may travel: `model.vision_balance`, or `replica` in the unified layout."""
        return self.config.model.vision_balance if self.layout == "colocated" else "replica"

    def to_tree(self) -> dict[str, Any]:
        """The plan as JSON-ready data; what can be derived from other entries is repeated for readers and tools."""
        batch = {name: getattr(self.batch, name) for name in BatchPlan.__dataclass_fields__}
        return {
            "world_size": self.world_size,
            "layout": self.layout,
            **batch,
            "macro_batches": list(self.batch.macro_batches),
            "modules": {name: _grid_tree(grid) for name, grid in self.modules.items()},
            "costs": {name: dataclasses.asdict(cost) for name, cost in self.costs.items()},
            "flops_per_step": self.flops_per_step,
            "memory_per_rank_bytes": dataclasses.asdict(self.memory),
            "command": list(self.command),
            "command_line": shlex.join(self.command),
            "config": dataclasses.asdict(self.config),
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> ExperimentPlan:
        """The plan that `to_tree` described.

        Raises:
            KeyError, TypeError: when entries are missing or of another kind.
            UserError: when the configuration inside does not fit this version's keys.
        """
        batch = {name: tree[name] for name in BatchPlan.__dataclass_fields__}
        batch["macro_batches"] = tuple(batch["macro_batches"])
        grid_fields = Grid.__dataclass_fields__
        return cls(
            config=build_config(tree["config"]),
            layout=tree["layout"],
            world_size=tree["world_size"],
            modules={name: Grid(**{f: entry[f] for f in grid_fields}) for name, entry in tree["modules"].items()},
            batch=BatchPlan(**batch),
            costs={name: ModuleCost(**cost) for name, cost in tree["costs"].items()},
            memory=MemoryPlan(**tree["memory_per_rank_bytes"]),
            command=tuple(tree["command"]),
        )

    def save(self, path: str | Path) -> None:
        """Write the plan to `path`, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.to_tree(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> ExperimentPlan:
        """Read a plan file.

        Raises:
            UserError: when the file is missing or is no plan.
        """
        try:
            return cls.from_tree(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise UserError(
                f"plan file {path}: {error.strerror or error}; write it with `run.py action=dryrun`"
            ) from error
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"plan file {path}: not a plan of this version ({type(error).__name__}: {error}); "
                "write it again with `run.py action=dryrun`"
            ) from error


def _grid_tree(grid: Grid) -> dict[str, Any]:
    groups = {"-".join(axes): grid.groups(*axes) for axes in GROUP_AXES}
    return {**dataclasses.asdict(grid), "size": grid.size, "groups": {**groups, "ep": grid.expert_groups()}}
