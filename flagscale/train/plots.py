"""Pictures of a run: its loss curves, and held-out images with question, answer and prediction."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.config.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One held-out sample, as text."""

    image: Path | bytes
    question: str
    answer: str
    prediction: str


def plot_losses(metrics: Sequence[dict[str, Any]], target: Path) -> None:
    """Training and validation losses and the accuracy over iterations, as PNG."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    training = [line for line in metrics if "lm_loss" in line]
    validation = [line for line in metrics if "eval_lm_loss" in line]
    for name, label in (("lm_loss", "LM loss"), ("mtp_1_loss", "MTP loss")):
        if any(line.get(name) is not None for line in training):
            left.plot([x["iteration"] for x in training], [x.get(name) for x in training], label=label, linewidth=1)
    if validation:
        xs = [x["iteration"] for x in validation]
        left.plot(xs, [x["eval_lm_loss"] for x in validation], "o-", label="validation LM loss", markersize=3)
        right.plot(xs, [100 * x["eval_accuracy"] for x in validation], "o-", color="tab:green", markersize=3)
    left.set(xlabel="iteration", ylabel="loss a token", yscale="log", title="loss")
    left.legend()
    right.set(xlabel="iteration", ylabel="%", ylim=(0, 101), title="exact match on held-out samples")
    _save(figure, target)


def plot_answers(answered: Sequence[Answered], target: Path, columns: int = 6) -> None:
    """A grid of held-out images with what was asked, the right answer, and what the model said, as PNG."""
    from PIL import Image

    plt = _pyplot()
    rows = -(-len(answered) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2.1 * columns, 2.5 * rows), constrained_layout=True, squeeze=False
    )
    for axis in axes.flat:
        axis.axis("off")
    for axis, sample in zip(axes.flat, answered, strict=False):
        file = io.BytesIO(sample.image) if isinstance(sample.image, bytes) else sample.image
        with Image.open(file) as image:
            axis.imshow(image.convert("RGB"))
        right = sample.answer == sample.prediction
        axis.set_title(
            f"{sample.question}\nanswer {sample.answer}, model {sample.prediction}",
            fontsize=7,
            color="tab:green" if right else "tab:red",
        )
    _save(figure, target)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(target, dpi=110)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}). Free space or change exp_dir.") from error
    _pyplot().close(figure)
