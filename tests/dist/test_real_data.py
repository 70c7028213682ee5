"""The main job on a mix of packed, balanced sources with bad samples in them: what it reports, and that it resumes."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from flagscale.train.metrics import read_metrics
from tests.data.helpers import sharegpt, small_digits, write_jsonl
from tests.dist.pool import run_ranks
from tests.dist.test_training import HELD_OUT, close, losses, plan_of, train, validated
from tools.data import make_digits

ITERATIONS, KILLED = 6, 4


def test_a_packed_mix_with_bad_samples_trains_and_resumes(tmp_path: Path) -> None:
    """Killed after iteration 4 with a checkpoint of iteration 3, and resumed on twice as many ranks, with read-ahead;
    the text corpus goes through several epochs."""
    digits = tmp_path / "digits"
    make_digits.make(digits, seed=1, num_train=60)
    documents = [{"text": "one two three " * (1 + i % 9)} for i in range(7)]
    texts = write_jsonl(tmp_path / "texts.jsonl", [*documents, "{", sharegpt("?", " ")])
    sources = (
        f"data.sources={{digits:{{path:{digits}/train.jsonl,weight:[[0,1],[5,3]]}},texts:{{path:{texts},weight:1.0}}}}"
    )
    keys = (
        sources, "data.packing=length_budget", "data.language_balance=true",
        "data.on_bad_sample=skip", "model.tensor_model_parallel_size=1", "model.vision_micro_batch_size=2",
        f"model.train_iters={ITERATIONS}", *validated(digits, 3), "system.checkpoint.save_interval=3",
    )  # fmt: skip
    two, four = ("experiment.runner.nproc_per_node=2", "experiment.runner.nproc_per_node=4")
    unbroken, broken = (plan_of(digits, tmp_path / name, two, *keys) for name in ("unbroken", "broken"))
    run_ranks(2, train, unbroken, timeout=240)
    run_ranks(2, train, broken, KILLED, timeout=240)
    resumed = plan_of(digits, tmp_path / "broken", four, *keys)
    assert (resumed.world_size, resumed.config.data.prefetch) == (4, 2)
    run_ranks(4, train, resumed, timeout=240)
    close(losses(tmp_path / "broken"), losses(tmp_path / "unbroken"), 1e-6)
    lines = [[line for line in read_metrics(tmp_path / name) if "lm_loss" in line] for name in ("broken", "unbroken")]
    counted = ("samples/digits", "samples/texts", "tokens/digits", "tokens/texts", "weight/texts", "num_tokens")
    one, other = ([[line[name] for name in counted] for line in run] for run in lines)
    assert one == other
    assert [line["samples/digits"] + line["samples/texts"] for line in lines[0]] == [16] * ITERATIONS
    assert lines[0][0]["weight/texts"] == 0.5
    assert lines[0][5]["weight/texts"] == 0.25
    assert all(line["padding_share"] < 0.02 and line["packing_efficiency"] > 0.6 for line in lines[0])
    bad = [json.loads(line) for line in (tmp_path / "broken" / "bad_samples.jsonl").read_text().splitlines()]
    assert [(entry["source"], entry["line"]) for entry in bad] == [(str(texts), 8), (str(texts), 9)]
    evaluations = [line for line in read_metrics(tmp_path / "broken") if "eval_accuracy" in line]
    assert evaluations[-1]["eval_samples"] == HELD_OUT


def test_steps_of_the_demo_hardly_wait_for_data(tmp_path: Path) -> None:
    """Under 1 % of the step, the first iteration apart, in which reading starts."""
    keys = ("experiment.runner.nproc_per_node=2", "model.train_iters=6")
    run_ranks(2, train, plan_of(small_digits(), tmp_path / "run", *keys), timeout=240)
    lines = [line for line in read_metrics(tmp_path / "run") if "lm_loss" in line][1:]
    assert len(lines) == 5
    assert statistics.median(line["data_wait_s"] / line["iteration_time_s"] for line in lines) < 0.01
