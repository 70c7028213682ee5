"""`run.json` tells a run that lives from one that ended, also when process ids were used again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flagscale.config.errors import UserError
from flagscale.runner import control, processes
from flagscale.runner.record import RunRecord, boot_id, claim, load_record

ME = os.getpid()


def record(**changes: object) -> RunRecord:
    """A run whose launcher is this process."""
    ticks = processes.start_ticks(ME) or 0
    base = RunRecord(
        run_id="a" * 32,
        host=socket.gethostname(),
        boot_id=boot_id(),
        launcher_pid=ME,
        launcher_ticks=ticks,
        job_pid=ME,
        job_ticks=ticks,
        command=["bash", "launch.sh"],
        train_iters=10,
        started_at=1.0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_record_survives_the_file(tmp_path: Path) -> None:
    assert load_record(tmp_path) is None
    record().save(tmp_path)
    assert load_record(tmp_path) == record()
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"pid": 1}'])
def test_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json: not a record"):
        load_record(tmp_path)


def test_process_id_that_was_used_again_is_not_the_run() -> None:
    assert record().launcher_is_alive
    assert not record(launcher_ticks=1).is_alive
    assert not record(boot_id="another").is_alive
    assert not record(host="another").is_alive


def test_start_ticks_of_zombies_and_strangers() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.start_ticks(child.pid) is None
    child.wait()
    assert processes.start_ticks(child.pid) is None


def test_folder_holds_one_job(tmp_path: Path) -> None:
    with claim(tmp_path / "new"), pytest.raises(UserError, match="action=stop"), claim(tmp_path / "new"):
        pass
    with claim(tmp_path / "new"):
        record().save(tmp_path / "new")
    with pytest.raises(UserError, match=f"process {ME}"), claim(tmp_path / "new"):
        pass
    record(launcher_ticks=1).save(tmp_path / "new")
    with claim(tmp_path / "new"):
        pass


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "running since"),
        ({"state": "finished", "exit_code": 0}, "finished with exit code 0"),
        ({"state": "stopped", "exit_code": 143}, "stopped with exit code 143"),
        ({"launcher_ticks": 1}, "ended without a word"),
        ({"host": "elsewhere"}, "on elsewhere; only there"),
    ],
)
def test_state_in_words(changes: dict[str, object], words: str) -> None:
    assert words in control.describe(record(**changes))


def test_newest_training_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert control.last_metrics(path) is None
    path.write_text('{"iteration": 1, "iteration_time_s": 1}\n{"iteration": 1, "eval_lm_loss": 1}\n{"iterat')
    assert control.last_metrics(path) == {"iteration": 1, "iteration_time_s": 1}
