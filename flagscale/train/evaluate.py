"""Validation: losses on held-out samples and how many answers are exactly right.

An answer is exactly right when, given the tokens before it, every token of it is the model's first choice; that is the
case exactly when greedy decoding would give this answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from flagscale.data.loader import DataPipeline
from flagscale.data.text import TextBatch
from flagscale.plan.layout import LANGUAGE
from flagscale.train.build import TrainState
from flagscale.train.step import TrainStep


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The model's answer to one held-out sample: first choices at the answer's positions, and the answer's tokens."""

    sample: int
    predicted: tuple[int, ...]
    expected: tuple[int, ...]

    @property
    def correct(self) -> bool:
        """Whether every token is right."""
        return self.predicted == self.expected


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Result of a validation, the same on every rank."""

    lm_loss: float
    mtp_loss: float
    predictions: tuple[Prediction, ...]

    @property
    def accuracy(self) -> float:
        """Share of the samples whose whole answer is right."""
        return sum(p.correct for p in self.predictions) / len(self.predictions) if self.predictions else 0.0


@torch.no_grad()
def evaluate(state: TrainState, step: TrainStep, held_out: DataPipeline, num_batches: int) -> Evaluation:
    """Runs the first `num_batches` global batches of the held-out split, without a trace in the training state.

    Collective over the world. A sample that pads the last batch counts once.
    """
    for module in state.modules.values():
        module.eval()
    totals = torch.zeros(4, dtype=torch.float64, device=state.platform.device)
    found: dict[int, Prediction] = {}
    for index in range(num_batches):
        for macro in held_out.step(index):
            _, rows = step.encode(macro)
            batches = step.on_device(macro)
            outputs = step.language.evaluate(batches, rows)
            if state.topology.coordinate(LANGUAGE)["tp"] == 0:
                for batch, output in zip(batches, outputs, strict=False):  # no outputs before the last stage
                    _collect(batch, output, totals, found)
    for module in state.modules.values():
        module.train()
    dist.all_reduce(totals)
    lm, num_lm, mtp, num_mtp = totals.tolist()
    gathered: list[dict[int, Prediction]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, found)
    merged = {sample: prediction for part in gathered for sample, prediction in part.items()}
    return Evaluation(
        lm_loss=lm / num_lm if num_lm else 0.0,
        mtp_loss=mtp / num_mtp if num_mtp else 0.0,
        predictions=tuple(merged[sample] for sample in sorted(merged)),
    )


def _collect(
    batch: TextBatch, output: dict[str, torch.Tensor], totals: torch.Tensor, found: dict[int, Prediction]
) -> None:
    """Adds the last stage's results of a microbatch to `totals` (lm, count, mtp, count) and `found`."""
    mask_BS = batch.loss_mask_BS
    totals += torch.stack([output["sums"][0], mask_BS.sum(), output["sums"][1], batch.mtp_mask_BS.sum()]).double()
    for sample, row, tokens in batch.spans():
        chosen = mask_BS[row, tokens].bool()
        found[sample] = Prediction(
            sample=sample,
            predicted=tuple(output["predictions_BS"][row, tokens][chosen].tolist()),
            expected=tuple(batch.labels_BS[row, tokens][chosen].tolist()),
        )
