"""Released weights -> training at any layout, unified or colocated -> released form, without losing a bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from flagscale.config.errors import UserError
from flagscale.config.schema import CheckpointConfig, ModelConfig, OptimizerConfig, SystemConfig
from flagscale.models.qwen35.hf_files import HFWeights
from flagscale.plan.plan import ExperimentPlan
from flagscale.train.checkpoint import Checkpoints
from tests.checkpoint.helpers import MODELS, read_folder, same, write_hf, write_yaml
from tests.dist.harness import build_state, full_parameters, make_plan
from tests.dist.pool import run_ranks
from tools.checkpoint.convert import main

LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "experts-tp2ep2": (
        "experts",
        2,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "dense-pp2": ("dense", 2, {"pipeline_model_parallel_size": 2}),
    "untied-tp2-vit_tp2": ("untied", 2, {"tensor_model_parallel_size": 2, "vision_tensor_model_parallel_size": 2}),
    "experts-pp2ep2-unified": (
        "experts",
        4,
        {"use_mimo": False, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    ),
}


# Where the run's own checkpoint is loaded again: a colocated one unified, a unified one colocated.
AGAIN: dict[str, tuple[int, dict[str, Any]]] = {
    "experts-tp2ep2": (2, {"use_mimo": False, "pipeline_model_parallel_size": 2}),
    "dense-pp2": (1, {}),
    "untied-tp2-vit_tp2": (2, {"vision_tensor_model_parallel_size": 2, "vision_micro_batch_size": 2}),
    "experts-pp2ep2-unified": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}


def plan_of(model: ModelConfig, world: int, pretrained: Path, exp_dir: Path, **keys: Any) -> ExperimentPlan:
    """A plan on `world` ranks that starts from `pretrained`."""
    shape = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    plan = make_plan(
        world,
        **{**shape, "global_batch_size": 4, "seq_length": 32, "optimizer": OptimizerConfig(weight_decay=0.0), **keys},
    )
    system = SystemConfig(checkpoint=CheckpointConfig(pretrained=str(pretrained)))
    experiment = dataclasses.replace(plan.config.experiment, exp_dir=str(exp_dir))
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, system=system, experiment=experiment))


def start_and_save(plan: ExperimentPlan) -> dict[str, torch.Tensor] | str:
    """Builds the training state and saves it; parameters on rank 0, or the refusal. Runs on a rank of the pool."""
    try:
        state = build_state(plan)
    except UserError as error:
        return str(error)
    try:
        state.optimizer.step(torch.zeros(2))  # of zero gradients: it changes no weight, and gives Adam its states
        Checkpoints(plan.exp_dir / "checkpoints", keep=2).save(state, {"iteration": 1})
        return full_parameters(state)
    finally:
        state.topology.destroy()


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_come_back_from_every_layout(name: str, tmp_path: Path) -> None:
    """bfloat16 weights survive fp32 training parameters; the second start is from the run's own checkpoint."""
    kind, world, keys = LAYOUTS[name]
    model, hf, mcore = MODELS[kind], tmp_path / "hf", tmp_path / "mcore"
    stored, config = write_hf(hf, model), write_yaml(tmp_path, model)
    assert main(["hf-to-mcore", *config, "--hf", str(hf), "--out", str(mcore)]) == 0
    held = run_ranks(world, start_and_save, plan_of(model, world, mcore, tmp_path / "run", **keys), timeout=200)[0]
    with HFWeights(hf, model) as weights:
        assert held.keys() == weights.places.keys()
        assert all(torch.equal(value, weights.get(name).float()) for name, value in held.items())
    saved = tmp_path / "run/checkpoints/iter_0000001"
    assert main(["mcore-to-hf", *config, "--mcore", str(saved), "--out", str(tmp_path / "back"), "--hf", str(hf)]) == 0
    same(read_folder(tmp_path / "back"), {key: value.float() for key, value in stored.items()})
    world, keys = AGAIN[name]
    again = run_ranks(world, start_and_save, plan_of(model, world, saved, tmp_path / "other", **keys), timeout=200)[0]
    assert again.keys() == held.keys()
    assert all(torch.equal(value, held[name]) for name, value in again.items())
