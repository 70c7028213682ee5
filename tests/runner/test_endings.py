"""Out of memory, a killed rank, values that are not finite and a damaged image end a job with one message."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.data.helpers import small_digits
from tests.runner.test_training_job import start

ENTRYPOINT = Path(__file__).parent / "failing_trainer.py"
MESSAGES = {
    "memory": r"rank 1 ran out of memory in iteration 2, phase language: CUDA out of memory\. Tried to allocate 2\.50 "
    r"GiB; lower model\.micro_batch_size \(now 1\); lower model\.seq_length \(now 144\); "
    r"lower model\.vision_micro_batch_size \(now 2\); set model\.vision_recompute=true; .*",
    "killed": r"rank 1 was ended by signal 9 \(SIGKILL, often the kernel when memory runs out\) in iteration 2, phase "
    r"language; if so: lower model\.micro_batch_size \(now 1\); .*; set experiment\.runner\.max_restarts .*",
    "nan": r"the last 3 steps \(iterations 2 to 4\) were skipped, their gradients are not finite: phase language, the "
    r"loss of rank 1; lower model\.optimizer\.lr \(now .*\); .* model\.optimizer\.max_skipped_steps \(now 3\) .*",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", MESSAGES)
def test_one_message(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT", fault)
    job = start(tmp_path, f"experiment.task.entrypoint={ENTRYPOINT}", "model.optimizer.max_skipped_steps=3")
    output, _ = job.communicate(timeout=550)
    assert job.returncode not in (0, 2), output
    assert "Traceback" not in output
    lines = [line for line in output.splitlines() if re.fullmatch(MESSAGES[fault], line)]
    assert len(lines) == 1, output
    assert "log of rank" in output.splitlines()[output.splitlines().index(lines[0]) + 1]
    if fault == "memory":
        assert "Traceback" in (tmp_path / "run/logs/rank1.err").read_text()


@pytest.mark.timeout(600)
def test_a_damaged_image_ends_all_ranks(tmp_path: Path) -> None:
    """One rank reads it, between the exchanges of a step: the other does not wait for it for ever."""
    source = shutil.copytree(small_digits(), tmp_path / "digits") / "train.jsonl"
    samples = map(json.loads, source.read_text().splitlines())
    image = source.parent / next(sample["images"][0] for sample in samples if sample.get("images"))
    image.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
    output, _ = start(tmp_path, data=source, iterations=100).communicate(timeout=550)  # the sample comes before
    ending = rf"error: {source} line \d+ \(id .*\): the sample has the image {image}, which is damaged .*"
    assert len([line for line in output.splitlines() if re.fullmatch(ending, line)]) == 1, output
    assert output.lower().count("error") == 1, output
    assert "Traceback" not in output
