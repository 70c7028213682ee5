"""A folder of YAML files for configuration tests, and the program run on it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from flagscale.config.loading import Loaded, load
from flagscale.run import main

SNIPPET = """\
experiment:
  task:
    entrypoint: ./flagscale/train/megatron/train_qwen35.py
model:
  use_mimo: true
  vision_tensor_model_parallel_size: 1
  vision_micro_batch_size: 4
  micro_batch_size: 2
  global_batch_size: 32
  tensor_model_parallel_size: 2
"""


@dataclass
class Project:
    """A user's folder with YAML files and a data file, outside any repository."""

    folder: Path

    def write(self, text: str, name: str = "mine") -> Path:
        """Write `name`.yaml and return its path."""
        path = self.folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def load(self, text: str, *overrides: str) -> Loaded:
        """The configuration of a YAML text with overrides."""
        self.write(text)
        return load("mine", self.folder, overrides, cwd=self.folder)

    def run(self, *arguments: str) -> int:
        """The program's exit code on mine.yaml with a data file that exists; a mistake is found within 3 s."""
        data = self.folder / "data.jsonl"
        data.write_text("{}\n")
        usual = {
            "action": "dryrun",
            "data.train_path": data,
            "data.valid_path": data,
            "experiment.exp_dir": self.folder / "exp",
        }
        names = {argument.partition("=")[0] for argument in arguments}
        filled = [f"{name}={value}" for name, value in usual.items() if name not in names]
        began = time.process_time()  # which a busy machine does not change
        code = main(["--config-path", str(self.folder), "--config-name", "mine", *filled, *arguments])
        assert code != 2 or time.process_time() - began < 3
        return code


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """An empty project."""
    return Project(tmp_path / "conf")
