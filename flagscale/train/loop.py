"""The training loop: iterations, validation, checkpoints, and what is reported of them."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from flagscale.data.loader import DataPipeline
from flagscale.plan.flops import utilisation
from flagscale.plan.layout import LANGUAGE, VISION
from flagscale.train.build import TrainState
from flagscale.train.checkpoint import Checkpoints
from flagscale.train.evaluate import Evaluation, evaluate
from flagscale.train.failure import SkippedSteps
from flagscale.train.language import LossWeights
from flagscale.train.metrics import Reporter, read_metrics
from flagscale.train.mix_control import MixControl
from flagscale.train.notice import LeaveNotice
from flagscale.train.plots import Answered, plot_answers, plot_losses
from flagscale.train.profile import IterationProfiler
from flagscale.train.shared import require_shared
from flagscale.train.step import StepReport, TrainStep

PICTURES = 24  # held-out images in plots/answers.png


class Training:
    """One run from its newest checkpoint to `train_iters`. A context manager: leaving it ends workers and writers.

    Args:
        state: as built.
        exp_dir: the run's folder.
    """

    def __init__(self, state: TrainState, exp_dir: Path) -> None:
        self._state = state
        self._config = state.plan.config
        self._exp_dir = exp_dir
        self._step = TrainStep(state)
        self._checkpoints = Checkpoints(exp_dir / "checkpoints", self._config.system.checkpoint.keep)
        self._progress = {"iteration": 0, "skipped": 0}
        if self._config.experiment.runner.nnodes > 1:
            require_shared(exp_dir / "checkpoints")
        newest = self._checkpoints.newest()
        if newest is not None:
            self._progress = self._checkpoints.load(state, newest)
        experiment, device = self._config.experiment, state.platform.device
        self._leave = LeaveNotice(exp_dir, device, watched=experiment.runner.type == "slurm")
        self._profiler = IterationProfiler(experiment.profile, exp_dir / "profile", cuda=state.platform.is_cuda)
        rank, pin = state.topology.rank, state.platform.is_cuda
        self._data = DataPipeline(state.plan, "train", rank, pin=pin)
        if "data" in self._progress:
            self._data.load_state_dict(self._progress["data"])
        self._held_out = DataPipeline(state.plan, "valid", rank, pin=pin) if self._config.data.valid_path else None
        self._mix = MixControl(exp_dir, self._data, self._progress["iteration"])
        self._skipped = SkippedSteps(self._config.model.optimizer.max_skipped_steps)
        self._reporter = Reporter(state.plan, exp_dir, self._progress["iteration"]) if rank == 0 else None
        self._say(f"{state.platform.description}; {_describe(state)}")
        if newest is not None:
            self._say(f"resumed from {newest}")
        if self._reporter is not None:
            self._report_bad_samples()

    def run(self) -> None:
        """Trains, validates and saves until `train_iters`, then writes the pictures; leaves earlier when asked to."""
        model, save_interval = self._config.model, self._config.system.checkpoint.save_interval
        first = self._progress["iteration"]
        for step in range(first, model.train_iters):
            self._profiler.before(step + 1)
            self._iterate(step)
            if step == first:
                # What exists now stays; without this, Python looks through all of it again and again.
                gc.collect()
                gc.freeze()
            done = self._progress["iteration"]
            timeline = self._profiler.after(done)
            if timeline is not None:
                self._say(f"profile: {timeline}")
            if model.eval_interval and done % model.eval_interval == 0 and done < model.train_iters:
                self._validate(model.eval_iters)
            if save_interval and done % save_interval == 0 and done < model.train_iters:
                self._save()
            if done < model.train_iters and self._leave.is_given():
                self._save()
                self._leave.answer()
                return
        if first < model.train_iters:
            self._save()
        self._finish()

    def _iterate(self, step: int) -> None:
        self._state.place.begin(f"in iteration {step + 1}")
        for line in self._mix.poll(step):
            self._say(line)
        weights = LossWeights.of_batch(
            num_loss_tokens=self._data.num_loss_tokens(step),
            num_mtp_loss_tokens=self._data.num_mtp_loss_tokens(step),
            mtp_loss_scaling_factor=self._config.model.mtp_loss_scaling_factor,
        )
        learning_rate = self._learning_rate()
        waited, start = self._data.wait_s, time.perf_counter()
        report = self._step.run(self._data.step(step), weights)
        seconds = time.perf_counter() - start
        self._progress["iteration"] = step + 1
        self._progress["skipped"] += report.outcome.skipped
        if self._reporter is not None:
            values = self._values(step, report, seconds)
            values["learning_rate"] = learning_rate
            values["data_wait_s"] = self._data.wait_s - waited
            self._reporter.metrics(values)
        self._skipped.note(report.outcome, step + 1)

    def _values(self, step: int, report: StepReport, seconds: float) -> dict[str, Any]:
        """The line of metrics.jsonl for one iteration."""
        plan, outcome = self._state.plan, report.outcome
        num_tokens = report.num_tokens
        lm, mtp = report.loss_sums.tolist()
        flops, peak = self._data.flops(step), self._state.peak_flops
        values = {
            "iteration": step + 1,
            "lm_loss": lm / max(self._data.num_loss_tokens(step), 1),
            "mtp_1_loss": mtp / max(self._data.num_mtp_loss_tokens(step), 1),
            "grad_norm": outcome.grad_norm,
            "grad_norm_vision": outcome.grad_norms[VISION],
            "grad_norm_language": outcome.grad_norms[LANGUAGE],
            "iteration_time_s": seconds,
            "samples_per_s": plan.batch.global_batch_size / seconds,
            "tokens_per_s": num_tokens / seconds,
            "tflops_per_gpu": flops / seconds / plan.world_size / 1e12,
            "num_tokens": num_tokens,
            "num_images": report.num_items,
            "vision_load_max_over_mean": max_over_mean(report.loads),
            "language_load_max_over_mean": max_over_mean(report.language_loads),
            "padding_share": 1 - num_tokens / report.num_computed,
            "packing_efficiency": num_tokens / report.capacity,
            "exchange_bytes": report.exchange_bytes,
            "skipped": self._progress["skipped"],
        }
        if plan.config.model.num_experts and plan.config.model.moe_aux_loss_coeff:
            layers = plan.config.model.num_layers + plan.config.model.mtp_num_layers
            values["moe_aux_loss"] = float(report.balance_sum) / (plan.batch.global_batch_size * layers)
        if peak is not None:
            values["mfu"] = utilisation(flops, seconds=seconds, gpus=plan.world_size, peak_flops=peak)
        values |= self._data.source_metrics(step)
        return values | {f"{phase}_s": seconds for phase, seconds in report.phase_s.items()}

    def _learning_rate(self) -> float:
        groups = self._state.optimizer.param_groups
        return next((group["lr"] for group in groups if group["default_config"]), groups[0]["lr"])

    def _validate(self, num_batches: int) -> Evaluation | None:
        if self._held_out is None:
            return None
        self._state.place.begin(f"in the validation after iteration {self._progress['iteration']}")
        result = evaluate(self._state, self._step, self._held_out, min(num_batches, self._held_out.num_batches))
        if self._reporter is not None:
            self._reporter.metrics(
                {
                    "iteration": self._progress["iteration"],
                    "eval_lm_loss": result.lm_loss,
                    "eval_mtp_1_loss": result.mtp_loss,
                    "eval_accuracy": result.accuracy,
                    "eval_samples": len(result.predictions),
                }
            )
        return result

    def _save(self) -> None:
        self._state.place.begin(f"while saving the checkpoint of iteration {self._progress['iteration']}")
        self._progress["data"] = self._data.state_dict(self._progress["iteration"])
        path = self._checkpoints.save(self._state, self._progress)
        self._say(f"saved {path}")

    def _finish(self) -> None:
        """Validates on the whole held-out split and draws."""
        result = self._validate(self._held_out.num_batches) if self._held_out is not None else None
        if self._reporter is None:
            return
        plots = self._exp_dir / "plots"
        plot_losses(read_metrics(self._exp_dir), plots / "losses.png")
        self._say(f"loss curves: {plots / 'losses.png'}")
        if result is not None:
            right, all_of_them = sum(p.correct for p in result.predictions), len(result.predictions)
            self._say(f"held-out exact match: {100 * result.accuracy:.1f} % ({right} of {all_of_them} samples)")
            self._draw_answers(result, plots / "answers.png")

    def _draw_answers(self, result: Evaluation, target: Path) -> None:
        answered = []
        for prediction in result.predictions:
            shown = self._held_out.shown(prediction.sample)
            if shown is not None and len(answered) < PICTURES:
                answer, said = (self._held_out.decode(ids) for ids in (prediction.expected, prediction.predicted))
                answered.append(Answered(image=shown.image, question=shown.question, answer=answer, prediction=said))
        if answered:
            plot_answers(answered, target)
            self._say(f"answers: {target}")

    def _report_bad_samples(self) -> None:
        """Lists the samples that were left out in exp_dir/bad_samples.jsonl."""
        pipelines = [self._data] if self._held_out is None else [self._data, self._held_out]
        bad = [sample for pipeline in pipelines for sample in pipeline.bad_samples()]
        path = self._exp_dir / "bad_samples.jsonl"
        path.unlink(missing_ok=True)
        if bad:
            path.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in bad), encoding="utf-8")
            self._say(f"left out {len(bad)} bad samples: {path}")

    def _say(self, line: str) -> None:
        if self._reporter is not None:
            self._reporter.say(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.unfreeze()  # a process that trains again would keep this run's model
        self._data.close()
        if self._held_out is not None:
            self._held_out.close()
        if self._reporter is not None:
            self._reporter.close()


def max_over_mean(loads: list[float]) -> float:
    """How uneven loads are; 1.0 when even or when there is none."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def _describe(state: TrainState) -> str:
    vision, language = (state.topology.grids[name] for name in (VISION, LANGUAGE))
    return (
        f"{state.plan.layout} on {dist.get_world_size()} ranks: ViT TP{vision.tp}/DP{vision.dp}, "
        f"LLM TP{language.tp}/PP{language.pp}/DP{language.dp}, vit_batch_factor {state.plan.batch.vit_batch_factor}"
    )
