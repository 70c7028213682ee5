"""`run.py` with the real torchrun, and a trainer that costs nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flagscale.runner import processes
from flagscale.runner.record import load_record

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """`run.py` on two ranks with the tiny trainer, in a folder whose name needs quoting."""
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"messages": []}\n')
    return [
        sys.executable,
        str(ROOT / "run.py"),
        f"experiment.exp_dir='{tmp_path}/a run'",
        f"experiment.task.entrypoint={HERE / 'tiny_trainer.py'}",
        "experiment.runner.nproc_per_node=2",
        "experiment.runner.stop_grace=2",
        "model.vision_micro_batch_size=8",
        f"data.train_path={samples}",
        f"data.valid_path={samples}",
        "system.platform=cpu",
    ]


def start(command: list[str], *arguments: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=280)
    return process.returncode, output


def test_test_action_leaves_nothing(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    code, output = finish(start(command, "action=test"))
    assert code == 0, output
    assert "iteration 3/3" in output
    assert "output thrown away" in output
    assert not (tmp_path / "a run").exists()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_query_and_stop_need_no_valid_plan(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").unlink()
    for action, words in (("query", "never started"), ("stop", "nothing to stop")):
        code, output = finish(start(command, f"action={action}", "model.global_batch_size=7"))
        assert (code, words in output) == (0, True), output
    assert not (tmp_path / "a run").exists()


def test_rank_that_raises(command: list[str], tmp_path: Path) -> None:
    code, output = finish(start(command, "+experiment.envs.TINY_MODE=raise"))
    exp_dir = tmp_path / "a run"
    assert code == 1
    assert "rank 1 failed\nTraceback (most recent call last):" in output
    assert "ValueError: the loss is nan" in output
    assert f"log of rank 1: {exp_dir}/logs/rank1.err" in output
    assert (exp_dir / "plan.json").exists()
    assert (exp_dir / "config.yaml").exists()
    answer = subprocess.run(
        ["bash", str(exp_dir / "launch.sh")], capture_output=True, text=True, timeout=280, check=False
    )
    assert answer.returncode == 1, "the script starts the same job by hand"


def test_rank_that_raises_once_is_started_again(command: list[str]) -> None:
    code, output = finish(start(command, "+experiment.envs.TINY_MODE=raise_once", "experiment.runner.max_restarts=1"))
    assert code == 0, output


COMMANDS = (
    'experiment.cmds.before_start="export WHERE=here && echo $WHERE > before"',
    "experiment.cmds.after_stop='date > after'",
)


def test_commands_around_a_job(command: list[str], tmp_path: Path) -> None:
    """They run in the working folder; what before_start exports reaches the ranks; a failure keeps its exit code."""
    code, output = finish(start(command, *COMMANDS, "+experiment.envs.TINY_MODE=raise", cwd=tmp_path))
    assert code == 1, output
    assert (tmp_path / "before").read_text() == "here\n"
    assert (tmp_path / "after").exists()
    assert "WHERE here" in (tmp_path / "a run/logs/rank0.out").read_text()


def test_command_that_fails_before_the_job(command: list[str], tmp_path: Path) -> None:
    code, output = finish(start(command, "experiment.cmds.before_start='(exit 7) && true'"))
    assert code == 7
    assert "before_start failed with exit code 7" in output
    assert not (tmp_path / "a run/rank0.pid").exists()


def test_interrupt_ends_a_job_with_commands(command: list[str], tmp_path: Path) -> None:
    patient = [text for text in command if "stop_grace" not in text] + ["experiment.runner.stop_grace=60"]
    process = start(patient, *COMMANDS, "+experiment.envs.TINY_MODE=wait", cwd=tmp_path)
    deadline = time.monotonic() + 200
    while not (tmp_path / "a run/metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 128 + signal.SIGTERM, output
    assert (tmp_path / "after").exists()


def test_interrupt_reaches_ranks_in_their_own_sessions(command: list[str], tmp_path: Path) -> None:
    process = start(command, "+experiment.envs.TINY_MODE=hang")
    exp_dir = tmp_path / "a run"
    deadline = time.monotonic() + 200
    while not (exp_dir / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    record = load_record(exp_dir)
    assert code == 128 + signal.SIGINT, output
    assert time.monotonic() - began < 60, "deaf for 300 s"
    assert record is not None
    assert processes.members(record.run_id) == []
