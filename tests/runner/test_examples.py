"""The job scripts in examples/ start what they say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples/qwen35_mimo"


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        (["slurm.sh"], ["8 processes = 1 x 8, slurm", "#SBATCH --gpus-per-node=8", "#SBATCH --signal=B:USR1@300"]),
        (["slurm.sh", "experiment.runner.slurm.time_limit=60"], ["#SBATCH --time=60\n", "#SBATCH --gpus-per-node=8"]),
        (["ssh.sh", "hosts.example"], ["8 processes = 2 x 4, ssh"]),
        (["job.sbatch"], ["8 processes = 1 x 8, local"]),
    ],
    ids=["slurm", "slurm-changed", "ssh", "sbatch"],
)
def test_script(script: list[str], parts: list[str], tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"messages": []}\n')
    overrides = [
        "action=dryrun",
        f"experiment.exp_dir={tmp_path}/run",
        f"data.train_path={samples}",
        "system.platform=auto",
    ]
    done = subprocess.run(
        ["bash", script[0], *script[1:], *overrides],
        cwd=FOLDER,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 = (vision dp 8 x vision_micro_batch_size 4) / (language dp 4 x micro_batch_size 2)" in done.stdout
    for part in parts:
        assert part in done.stdout
    assert not list((tmp_path / "run").glob("logs/*"))


def test_ssh_script_wants_a_hostfile() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, str(FOLDER / "ssh.sh")], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 2
    assert "usage: " in done.stderr
