"""The demo in small as a whole job: a rank that is killed, the restart from the newest checkpoint, and a profile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from flagscale.config.errors import UserError
from flagscale.runner import processes
from flagscale.runner.record import load_record
from flagscale.train.timeline import PHASES, draw_timeline, read_trace
from tests.data.helpers import small_digits
from tests.runner.ranks import check_restarted, rank_process
from tools import timeline

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "model.num_layers=2", "model.full_attention_interval=2", "model.hidden_size=32", "model.ffn_hidden_size=48",
    "model.vision_hidden_size=32", "model.vision_ffn_hidden_size=48", "model.linear_num_value_heads=4",
    "model.kv_channels=32", "model.global_batch_size=8", "model.eval_interval=null", "data.valid_path=null",
    "system.logging.wandb=false", "system.logging.tensorboard=false", "model.micro_batch_size=1",
    "model.vision_micro_batch_size=2", "model.tensor_model_parallel_size=1", "experiment.runner.nproc_per_node=2",
)  # fmt: skip
ITERATIONS = 8
PACED = Path(__file__).parent / "paced_trainer.py"


def start(
    folder: Path, *overrides: str, data: Path | None = None, iterations: int = ITERATIONS
) -> subprocess.Popen[str]:
    """`run.py` on the demo in small, or on other data."""
    return subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "run.py"),
            *SMALL,
            f"experiment.exp_dir={folder}/run",
            f"data.train_path={data or small_digits() / 'train.jsonl'}",
            f"model.train_iters={iterations}",
            *overrides,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(600)
def test_killed_rank_is_restarted_from_the_newest_checkpoint_and_profiled(tmp_path: Path) -> None:
    job = start(
        tmp_path,
        f"experiment.task.entrypoint={PACED}",
        "system.checkpoint.save_interval=2",
        "experiment.runner.max_restarts=1",
        "experiment.profile.start=7",
        "experiment.profile.stop=8",
    )
    exp_dir = tmp_path / "run"
    deadline = time.monotonic() + 300
    while not (exp_dir / "checkpoints/iter_0000002").exists():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    record = load_record(exp_dir)
    assert record is not None
    os.kill(rank_process(f"{processes.RUN_ID}={record.run_id}", 1), signal.SIGKILL)
    output, _ = job.communicate(timeout=500)
    assert job.returncode == 0, output
    check_restarted(exp_dir, output, ITERATIONS)
    check_profile(exp_dir / "profile", output)


def check_profile(folder: Path, output: str) -> None:
    assert f"profile: {folder}/timeline.png" in output
    for rank in range(2):
        spans = read_trace(folder / f"rank{rank}.json")
        assert {span.phase for span in spans} >= {*PHASES, "microbatch"}
        assert sum(span.phase == "optimizer" for span in spans) == 2, "two iterations"
    before = (folder / "timeline.png").read_bytes()
    assert Image.open(folder / "timeline.png").width > 1000
    (folder / "timeline.png").unlink()
    assert timeline.main([str(folder)]) == 0
    assert (folder / "timeline.png").read_bytes() == before


def test_what_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert timeline.main([str(tmp_path)]) == 2
    assert "holds no trace with phases" in capsys.readouterr().err
    (tmp_path / "rank0.json").write_text("[")
    with pytest.raises(UserError, match="no Chrome trace"):
        draw_timeline(tmp_path)
