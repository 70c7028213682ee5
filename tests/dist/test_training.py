"""The main job on real ranks and real data: resuming, validation between iterations, unified against colocated."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from flagscale.config.loading import load
from flagscale.plan.build import checked_plan
from flagscale.plan.plan import ExperimentPlan
from flagscale.platforms import get_platform
from flagscale.runner.render import torchrun_command
from flagscale.train import loop
from flagscale.train.build import build
from flagscale.train.language import LossWeights
from flagscale.train.loop import Training
from flagscale.train.metrics import read_metrics
from tests.data.helpers import small_digits
from tests.dist.pool import run_ranks

SMALL = (
    "model.num_layers=2", "model.full_attention_interval=2", "model.hidden_size=32", "model.ffn_hidden_size=48",
    "model.vision_hidden_size=32", "model.vision_ffn_hidden_size=48", "model.linear_num_value_heads=4",
    "model.kv_channels=32", "model.seq_length=144", "model.global_batch_size=16", "model.eval_interval=null",
    "data.valid_path=null", "system.logging.wandb=false", "system.logging.tensorboard=false",
)  # fmt: skip


@pytest.fixture
def digits() -> Path:
    """A small digits data set."""
    return small_digits()


HELD_OUT = 32  # samples; a run that validates ends with all of them, and whole runs here are a few iterations long


def validated(digits: Path, interval: int) -> tuple[str, ...]:
    """Keys of a run that validates on the first held-out samples of a digits data set."""
    held_out = digits / "held_out.jsonl"
    if not held_out.exists():
        lines = (digits / "valid.jsonl").read_text().splitlines(keepends=True)
        held_out.write_text("".join(lines[:HELD_OUT]))
    return (f"data.valid_path={held_out}", f"model.eval_interval={interval}", "model.eval_iters=1")


def plan_of(digits: Path, exp_dir: Path, *overrides: str) -> ExperimentPlan:
    """The plan of the default run in small, without validation; `overrides` win."""
    fixed = (f"data.train_path={digits}/train.jsonl", f"experiment.exp_dir={exp_dir}")
    chosen = {text.split("=", 1)[0]: text for text in (*SMALL, *fixed, *overrides)}
    loaded = load("qwen35_mimo", None, list(chosen.values()))
    return checked_plan(loaded, torchrun_command)


def train(plan: ExperimentPlan, stop_after: int | None = None) -> None:
    """Trains on a rank of the pool; `stop_after` leaves after that many iterations and a macro batch of the next.

    So a killed job would: its samples are read, and a part of its gradients is there.
    """
    state = build(plan, get_platform("cpu"))
    try:
        with Training(state, plan.exp_dir) as training:
            if stop_after is None:
                training.run()
            else:
                for step in range(stop_after):
                    training._iterate(step)
                    if step + 1 == plan.config.system.checkpoint.save_interval:
                        training._save()
                half = next(iter(training._data.step(stop_after)))
                assert half.spec.num_microbatches < plan.batch.num_microbatches
                _, rows = training._step.encode(half)
                training._step.language.train(training._step.on_device(half), rows, LossWeights(lm=1.0, mtp=1.0))
        dist.barrier()
    finally:
        state.topology.destroy()


def losses(exp_dir: Path) -> dict[int, tuple[float, float, float]]:
    """(lm, mtp, grad norm) by iteration."""
    lines = [line for line in read_metrics(exp_dir) if "lm_loss" in line]
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))
    return {line["iteration"]: (line["lm_loss"], line["mtp_1_loss"], line["grad_norm"]) for line in lines}


def close(a: Any, b: Any, relative: float) -> None:
    """Equal iterations with values within `relative`."""
    assert a.keys() == b.keys()
    for iteration, values in a.items():
        assert values == pytest.approx(b[iteration], rel=relative), f"iteration {iteration}"


def test_a_resumed_run_equals_an_unbroken_one(digits: Path, tmp_path: Path) -> None:
    """Killed inside iteration 5 with a checkpoint of iteration 2: iterations 3 and 4 are done again, no sample is lost.

    The unbroken run validates in between, which leaves no trace; it reads in a thread, the broken one in processes.
    """
    keys = ("model.train_iters=6", "model.vision_micro_batch_size=2")  # two macro batches an iteration
    unbroken = plan_of(digits, tmp_path / "unbroken", *keys, *validated(digits, 2))
    run_ranks(4, train, unbroken)
    broken = plan_of(digits, tmp_path / "broken", *keys, "system.checkpoint.save_interval=2", "data.workers=1")
    run_ranks(4, train, broken, 4)
    assert len(losses(tmp_path / "broken")) == 4
    (tmp_path / "broken" / "checkpoints" / ".partial-iter_0000005").mkdir()  # half written: must not be taken
    run_ranks(4, train, broken)
    close(losses(tmp_path / "broken"), losses(tmp_path / "unbroken"), 1e-6)
    names = sorted(path.name for path in (tmp_path / "broken" / "checkpoints").glob("iter_*"))
    assert names == ["iter_0000004", "iter_0000006"]  # the newest two are kept


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ExperimentPlan:
    """A run of four iterations at TP2, to compare with."""
    plan = plan_of(small_digits(), tmp_path_factory.mktemp("whole") / "run", "model.train_iters=4")
    run_ranks(4, train, plan)
    return plan


def test_a_checkpoint_continues_at_another_layout(digits: Path, whole: ExperimentPlan, tmp_path: Path) -> None:
    """Two iterations at TP2, then two at TP1 and ViT TP2: the same as four at TP2, up to rounding."""
    first = plan_of(digits, tmp_path / "moved", "model.train_iters=2")
    run_ranks(4, train, first)
    layout = ("model.tensor_model_parallel_size=1", "model.vision_tensor_model_parallel_size=2")
    second = plan_of(
        digits, tmp_path / "moved", "model.train_iters=4", *layout, "model.micro_batch_size=2",
        "model.vision_micro_batch_size=8",
    )  # fmt: skip
    run_ranks(4, train, second)
    close(losses(tmp_path / "moved"), losses(whole.exp_dir), 2e-4)


def test_unified_equals_colocated(digits: Path, whole: ExperimentPlan, tmp_path: Path) -> None:
    """The same batches, losses and norms, up to rounding."""
    unified = plan_of(digits, tmp_path / "unified", "model.train_iters=4", "model.use_mimo=false")
    assert (whole.layout, unified.layout) == ("colocated", "unified")
    run_ranks(4, train, unified)
    close(losses(tmp_path / "unified"), losses(whole.exp_dir), 1e-4)


def test_a_run_leaves_its_files(digits: Path, tmp_path: Path) -> None:
    """Metrics with every promised key, validation lines, plots."""
    plan = plan_of(digits, tmp_path / "run", "model.train_iters=2", *validated(digits, 1))
    run_ranks(4, train, plan)
    lines = read_metrics(tmp_path / "run")
    promised = {
        "iteration", "lm_loss", "mtp_1_loss", "grad_norm", "grad_norm_vision", "grad_norm_language", "learning_rate",
        "iteration_time_s", "samples_per_s", "tokens_per_s", "tflops_per_gpu", "num_tokens", "num_images",
        "vision_load_max_over_mean", "skipped", "exchange_bytes", "data_wait_s",
    }  # fmt: skip
    assert promised <= lines[0].keys()
    assert "mfu" not in lines[0]  # nobody knows a CPU's peak
    evaluations = [line for line in lines if "eval_lm_loss" in line]
    assert {"iteration", "eval_lm_loss", "eval_mtp_1_loss", "eval_accuracy"} <= evaluations[0].keys()
    assert [line["iteration"] for line in evaluations] == [1, 2]
    assert evaluations[-1]["eval_samples"] == HELD_OUT  # the final validation covers the whole split
    for name in ("losses.png", "answers.png"):
        assert (tmp_path / "run" / "plots" / name).read_bytes()[:4] == b"\x89PNG"
    assert dataclasses.replace(plan) == plan


def frozen_after(plan: ExperimentPlan) -> int:
    """Objects that garbage collection leaves out on this rank after a run as a process of its own would do it."""
    with mock.patch.object(loop, "gc", gc):
        train(plan)
    return gc.get_freeze_count()


def test_a_short_run(digits: Path, tmp_path: Path) -> None:
    """`mfu` is the share of the peak that is given. Nothing stays frozen: a process that trains again would keep the
    model of every run before."""
    keys = ("model.train_iters=1", "system.peak_tflops=0.5")
    assert run_ranks(4, frozen_after, plan_of(digits, tmp_path / "run", *keys)) == [0] * 4
    line = read_metrics(tmp_path / "run")[0]
    assert line["mfu"] == pytest.approx(line["tflops_per_gpu"] / 0.5)
