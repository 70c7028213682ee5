"""Sweeps: a folder a run, all checked before the first starts, a table at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flagscale.config.errors import UserError
from flagscale.config.layers import parse_overrides
from flagscale.runner.sweep import variants

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(tmp_path: Path, *overrides: str) -> tuple[int, str, str]:
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"messages": []}\n')
    settings = [
        f"experiment.exp_dir={tmp_path}/sweep",
        f"experiment.task.entrypoint={HERE / 'tiny_trainer.py'}",
        "experiment.runner.nproc_per_node=1",
        "model.tensor_model_parallel_size=1",
        "model.micro_batch_size=1",
        "model.train_iters=3",
        f"data.train_path={samples}",
        f"data.valid_path={samples}",
        "system.platform=cpu",
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "-m", *settings, *overrides],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_runs_follow_each_other_and_are_compared(tmp_path: Path) -> None:
    code, output, errors = run(tmp_path, "model.vision_micro_batch_size=2,4")
    assert code == 0, output + errors
    for size in (2, 4):
        folder = tmp_path / f"sweep/vision_micro_batch_size={size}"
        assert json.loads((folder / "plan.json").read_text())["vit_batch_factor"] == size
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
    table = (tmp_path / "sweep/compare.md").read_text()
    assert table.count("vision_micro_batch_size=") == 2
    assert (tmp_path / "sweep/compare.png").stat().st_size > 10_000
    assert "speed-up" in output


def test_all_runs_are_checked_before_the_first_starts(tmp_path: Path) -> None:
    code, _, errors = run(tmp_path, "model.num_layers=4,5", "model.seed=1,2")
    assert code == 2
    assert "error: -m: num_layers=5,seed=2: model.num_layers = 5" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.seed=1"], "no key has several values"),
        (["model.seed=1,1"], "two runs of the sweep are the same"),
        (["model.seed=1,2", "experiment.runner.detach=true"], "cannot sweep"),
        (["model.seed=1,2", "action=stop"], "action = 'stop'"),
        (["model.seed=1,2", "experiment.runner.type=slurm"], "cannot sweep"),
    ],
)
def test_what_cannot_sweep_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    code, _, errors = run(tmp_path, *overrides)
    assert (code, message in errors) == (2, True), errors


def test_every_combination_has_a_name_of_its_own() -> None:
    found = variants(parse_overrides(["model.seed=1,2", "+model.lr=0.1,0.2", "action=run"], sweep=True))
    assert [variant.name for variant in found] == ["seed=1,lr=0.1", "seed=1,lr=0.2", "seed=2,lr=0.1", "seed=2,lr=0.2"]
    assert found[0].overrides == ("action=run", "model.seed=1", "+model.lr=0.1")
    with pytest.raises(UserError, match="no key has several values"):
        variants(parse_overrides(["model.seed=1"]))
