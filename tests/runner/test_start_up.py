"""What the program does not import: the launcher no torch, a rank on a CPU no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import sys, torch
compile_ = torch.compile
sys.argv = ["train"]
import flagscale.train.megatron.train_qwen35
assert torch.compile is compile_
loaded = [name for name in ("torch._inductor", "torch._dynamo", "wandb", "transformers") if sys.modules.get(name)]
assert not loaded, loaded
import wandb
"""
LAUNCHER = """
import sys
from flagscale.run import main
assert main(["action=explain", "key=model.seq_length"]) == 0
loaded = [name for name in ("torch", "numpy", "matplotlib") if name in sys.modules]
assert not loaded, loaded
"""


@pytest.mark.parametrize("code", [RANK, LAUNCHER], ids=["rank", "launcher"])
def test_imports(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
