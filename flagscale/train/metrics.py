"""What a run reports: metrics.jsonl, TensorBoard, Weights & Biases, and lines for the terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flagscale.plan.plan import ExperimentPlan


class Reporter:
    """Writes metrics to every place the configuration names. Only rank 0 makes one.

    Args:
        plan: the run's plan.
        exp_dir: receives metrics.jsonl, logs/console.log, tensorboard/ and wandb/.
        resumed_at: iterations already done; lines of later iterations, left by a run that went on after its last
            checkpoint, are cut from metrics.jsonl.
    """

    def __init__(self, plan: ExperimentPlan, exp_dir: Path, resumed_at: int) -> None:
        self._plan, self._exp_dir = plan, exp_dir
        (exp_dir / "logs").mkdir(parents=True, exist_ok=True)
        path = exp_dir / "metrics.jsonl"
        kept = [line for line in _lines(path) if json.loads(line)["iteration"] <= resumed_at]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        temporary.replace(path)
        self._file = path.open("a", buffering=1)
        self._console = (exp_dir / "logs" / "console.log").open("a", buffering=1)
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._is_tracked = False

    def metrics(self, values: dict[str, Any]) -> None:
        """Appends one line; `values` holds `iteration` and numbers or lists."""
        self._file.write(json.dumps(values) + "\n")
        if not self._is_tracked:
            self._open_trackers()
        scalars = {k: v for k, v in values.items() if isinstance(v, int | float) and k != "iteration"}
        if self._tensorboard is not None:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, values["iteration"])
        if self._wandb is not None:
            self._wandb.log(scalars, step=values["iteration"])

    def _open_trackers(self) -> None:
        """Opens TensorBoard and Weights & Biases: after the first line, since all ranks wait the 2 s that it takes."""
        self._is_tracked, logging = True, self._plan.config.system.logging
        if logging.tensorboard:
            self._tensorboard = _tensorboard(self._exp_dir / "tensorboard")
        if logging.wandb:
            self._wandb = _wandb(self._plan, self._exp_dir)

    def say(self, line: str) -> None:
        """Adds a line to logs/console.log, which the launcher shows."""
        self._console.write(line + "\n")

    def close(self) -> None:
        """Flushes and closes everything."""
        self._file.close()
        self._console.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(exp_dir: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in _lines(exp_dir / "metrics.jsonl")]


def _lines(path: Path) -> list[str]:
    """Whole lines of a file; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    text = path.read_text()
    return [line for line in text[: text.rfind("\n") + 1].splitlines() if line]


def _tensorboard(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def _wandb(plan: ExperimentPlan, exp_dir: Path) -> Any:
    import wandb

    folder = exp_dir / "wandb"
    folder.mkdir(exist_ok=True)
    return wandb.init(
        project=plan.config.system.logging.wandb_project,
        name=plan.config.experiment.exp_name,
        dir=str(exp_dir),
        mode=None if os.environ.get("WANDB_API_KEY") else "offline",
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True),
    )
