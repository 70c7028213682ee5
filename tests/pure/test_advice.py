"""After a bad end the keys of that place are named, with their values, and only those that have an effect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flagscale.config.loading import load
from flagscale.config.schema import Config
from flagscale.plan.advice import divergence_advice, memory_advice, peer_advice, reader_advice
from flagscale.plan.build import make_plan
from flagscale.plan.notes import notes


@pytest.fixture
def config() -> Config:
    """The demo's."""
    return load("qwen35_mimo", None, []).config


@pytest.mark.parametrize(
    ("phase", "first"),
    [
        ("vision_backward", "lower model.vision_micro_batch_size (now 4)"),
        ("language", "lower model.micro_batch_size (now 2)"),
        ("optimizer", "raise model.tensor_model_parallel_size (now 2)"),
        ("", "raise model.tensor_model_parallel_size (now 2)"),
    ],
)
def test_keys_of_the_phase_come_first(config: Config, phase: str, first: str) -> None:
    assert memory_advice(config, phase).split("; ")[0] == first


def test_only_what_has_an_effect(config: Config) -> None:
    assert "set model.vision_recompute=true" in memory_advice(config, "vision_forward")
    recomputes = replace(config, model=replace(config.model, vision_recompute=True))
    assert "vision_recompute" not in memory_advice(recomputes, "vision_forward")
    unified = replace(config, model=replace(config.model, use_mimo=False))
    assert "vision_micro_batch_size" not in memory_advice(unified, "vision_forward")
    assert "system.bf16" not in memory_advice(replace(config, system=replace(config.system, bf16=True)), "optimizer")


def test_lost_peers(config: Config) -> None:
    assert peer_advice(config) == (
        "set experiment.runner.max_restarts to start again from the newest checkpoint; "
        "experiment.envs={NCCL_DEBUG: INFO} shows how NCCL connects"
    )
    runner = replace(config.experiment.runner, max_restarts=1)
    system = replace(config.system, platform="cpu", checkpoint=replace(config.system.checkpoint, save_interval=None))
    restarting = replace(config, experiment=replace(config.experiment, runner=runner), system=system)
    assert peer_advice(restarting) == "set system.checkpoint.save_interval (now null) to have one"


def test_lost_readers(config: Config) -> None:
    data = replace(config.data, workers=2, prefetch=4)
    said = reader_advice(replace(config, data=data))
    for part in ("/dev/shm", "data.prefetch (now 4)", "data.workers (now 2)", "data.workers=0"):
        assert part in said


def test_values_that_are_not_finite(config: Config) -> None:
    assert divergence_advice(config).startswith("lower model.optimizer.lr (now 0.0")
    assert "clip_grad" not in divergence_advice(config)
    optimizer = replace(config.model.optimizer, clip_grad=0.0)
    assert "model.optimizer.clip_grad (now 0, off)" in divergence_advice(
        replace(config, model=replace(config.model, optimizer=optimizer))
    )


def test_buckets_without_overlap_are_reported() -> None:
    loaded = load("qwen35_mimo", None, ["system.overlap_grad_reduce=false", "system.ddp_bucket_size=7"])
    assert "system.ddp_bucket_size: no effect with overlap_grad_reduce false" in notes(loaded, make_plan(loaded.config))
