"""The look-alike of 35B-A3B as a user trains it: colocated, experts over two ranks, on the demo's data."""

from __future__ import annotations

from pathlib import Path

from flagscale.config.loading import load
from flagscale.plan.build import checked_plan
from flagscale.runner.render import torchrun_command
from flagscale.train.metrics import read_metrics
from tests.data.helpers import small_digits
from tests.dist.pool import run_ranks
from tests.dist.test_training import train

ITERATIONS = 6
OVERRIDES = (
    "model=qwen35_tiny_moe", "model.tensor_model_parallel_size=2", "model.expert_model_parallel_size=2",
    "model.sequence_parallel=true", f"model.train_iters={ITERATIONS}", "model.init_method_std=0.06",
    "model.optimizer.lr_warmup_iters=0", "model.global_batch_size=16", "model.eval_interval=null",
    "data.valid_path=null", "system.logging.wandb=false", "system.logging.tensorboard=false", "model.num_layers=2",
    "model.full_attention_interval=2",
)  # fmt: skip


def test_the_look_alike_with_experts_learns(tmp_path: Path) -> None:
    data = f"data.train_path={small_digits()}/train.jsonl"
    loaded = load("qwen35_mimo", None, [*OVERRIDES, data, f"experiment.exp_dir={tmp_path}/run"])
    plan = checked_plan(loaded, torchrun_command)
    assert (plan.layout, plan.batch.vit_batch_factor) == ("colocated", 4)
    assert (plan.vision.tp, plan.vision.dp) == (1, 4)
    assert (plan.language.tp, plan.language.dp, plan.language.ep) == (2, 2, 2)
    run_ranks(4, train, plan, timeout=240)
    lines = read_metrics(tmp_path / "run")
    losses = [line["lm_loss"] for line in lines]
    assert len(losses) == ITERATIONS
    assert sum(losses[-2:]) < 0.95 * sum(losses[:2]), losses
    model = plan.config.model
    assert all(1 < line["moe_aux_loss"] < model.num_experts / model.moe_router_topk for line in lines)
    assert lines[-1]["skipped"] == 0
