"""Real processes: a launcher of its own, jobs that end well, fail, hang or are deaf, and nothing left afterwards."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flagscale.runner import control, processes
from flagscale.runner.progress import Console
from flagscale.runner.record import RunRecord, load_record

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEAF = ("--iterations", "1", "--step", "300", "--ignore-sigterm", "--grandchild")


class Launch:
    """A launcher process on a fake job in a folder of its own."""

    def __init__(self, exp_dir: Path) -> None:
        self.exp_dir = exp_dir
        self.process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str, mode: str = "foreground", grace: float = 1.0) -> subprocess.Popen[str]:
        job = [sys.executable, str(HERE / "fake_job.py"), str(self.exp_dir), *arguments]
        command = [sys.executable, str(HERE / "launcher.py"), str(self.exp_dir), mode, str(grace), "--", *job]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        return self.process

    def run(self, *arguments: str, mode: str = "foreground", grace: float = 1.0) -> tuple[int, str]:
        """Exit code and output of the launcher."""
        process = self.start(*arguments, mode=mode, grace=grace)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    @property
    def record(self) -> RunRecord:
        record = load_record(self.exp_dir)
        assert record is not None
        return record

    @property
    def members(self) -> list[int]:
        return processes.members(self.record.run_id)

    def wait_for_members(self, count: int) -> None:
        """Until the job has `count` processes, and the deaf ones had time to become so."""
        wait_until(lambda: load_record(self.exp_dir) is not None and len(self.members) == count)
        time.sleep(0.3)

    def query(self) -> str:
        stream = io.StringIO()
        assert control.query(self.exp_dir, Console(stream)) == 0
        return stream.getvalue()

    def stop(self, grace: float = 1.0) -> str:
        stream = io.StringIO()
        assert control.stop(self.exp_dir, grace, Console(stream)) == 0
        return stream.getvalue()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """A launch; whatever a failed test leaves running is ended."""
    launch = Launch(tmp_path / "it's a $run")
    yield launch
    record = load_record(launch.exp_dir)
    if record is not None:
        processes.end_job(record.run_id, record.job_pid, 0.0)
    if launch.process is not None and launch.process.poll() is None:
        launch.process.kill()


def test_job_that_ends_well(launch: Launch) -> None:
    code, output = launch.run("--iterations", "5", "--say", "accuracy 95 %")
    assert code == 0
    assert output.splitlines()[0].startswith(f"logs: {launch.exp_dir}/logs")
    assert "iteration 5/5 | ETA 0:00 | loss 0.2000" in output
    assert output.splitlines()[-1] == "accuracy 95 %"
    assert (launch.record.state, launch.record.exit_code) == ("finished", 0)
    assert "finished with exit code 0" in launch.query()
    assert "iteration 5/5 | loss 0.2000" in launch.query()


def test_exit_code_is_the_jobs(launch: Launch) -> None:
    assert launch.run("--exit", "7")[0] == 7
    assert (launch.record.state, launch.record.exit_code) == ("failed", 7)


def test_users_mistake_found_by_a_rank(launch: Launch) -> None:
    code, output = launch.run("--user-error", "data.train_path: line 3 is no JSON")
    assert code == 2
    assert output.splitlines()[-1] == "error: data.train_path: line 3 is no JSON"
    assert launch.run()[0] == 0, "an old mistake must not fail the next run"


def test_failed_rank_is_shown_with_its_log(launch: Launch) -> None:
    code, output = launch.run("--fail-rank", "2")
    assert code == 1
    assert "rank 2 failed\nTraceback (most recent call last):" in output
    assert "ValueError: the loss is nan" in output
    assert output.splitlines()[-1] == f"log of rank 2: {launch.exp_dir}/logs/rank2.err"
    assert "closed by peer" not in output


def test_ranks_that_hang_after_a_failure_are_ended(launch: Launch) -> None:
    began = time.monotonic()
    code, output = launch.run("--fail-rank", "1", "--hang-after-failure", grace=1.0)
    assert code == 1
    assert "rank 1 failed" in output
    assert time.monotonic() - began < 60, "the peer of a dead rank sleeps for 300 s"
    assert launch.members == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_everything_even_what_is_deaf(launch: Launch, number: signal.Signals) -> None:
    process = launch.start(*DEAF, grace=1.0)
    launch.wait_for_members(2)
    began = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=100)
    assert time.monotonic() - began < 60, "deaf for 300 s"
    assert process.returncode == 128 + number
    assert f"ended by {number.name}" in output
    assert launch.members == []
    assert launch.record.state == "stopped"


def test_second_signal_ends_the_grace(launch: Launch) -> None:
    process = launch.start(*DEAF, grace=60.0)
    launch.wait_for_members(2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=50) == 128 + signal.SIGINT
    assert launch.members == []


def test_job_gets_time_to_end_by_itself(launch: Launch) -> None:
    process = launch.start("--iterations", "1", "--step", "300", grace=60.0)
    launch.wait_for_members(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=50) == 128 + signal.SIGTERM


def test_job_does_not_outlive_a_killed_launcher(launch: Launch) -> None:
    process = launch.start("--iterations", "1", "--step", "300")
    launch.wait_for_members(1)
    process.kill()
    wait_until(lambda: launch.members == [])
    process.wait()
    assert "ended without a word" in launch.query()
    assert launch.run()[0] == 0, "the folder is free again"


def test_stop_without_a_launcher(launch: Launch) -> None:
    process = launch.start(*DEAF)
    launch.wait_for_members(2)
    process.kill()
    process.wait()
    assert "without its launcher" in launch.query()
    code, output = Launch(launch.exp_dir).run()
    assert (code, "action=stop" in output) == (2, True)
    assert launch.stop(grace=0.5).endswith("stopped\n")
    assert launch.members == []
    assert "stopped with exit code 143" in launch.query()


def test_background_job_is_queried_and_stopped(launch: Launch) -> None:
    assert "never started" in launch.query()
    assert "nothing to stop" in launch.stop()
    code, output = launch.run("--iterations", "1", "--step", "300", "--grandchild", mode="detached")
    assert code == 0
    assert "action=query" in output
    assert "running since" in launch.query()
    code, output = launch.run()
    assert (code, "a job runs in this folder" in output) == (2, True)
    assert launch.stop().endswith("stopped\n")
    assert launch.members == []
    wait_until(lambda: not launch.record.launcher_is_alive)
    assert "stopped with exit code 143" in launch.query()
    assert "nothing to stop" in launch.stop()


def test_background_job_records_its_end(launch: Launch) -> None:
    code, _ = launch.run("--iterations", "2", "--exit", "3", mode="detached")
    assert code == 0
    wait_until(lambda: launch.record.state != "running")
    assert (launch.record.state, launch.record.exit_code) == ("failed", 3)
    assert "iteration 2/5" in (launch.exp_dir / "logs" / "launcher.log").read_text()


def test_background_job_that_cannot_start(launch: Launch) -> None:
    command = [
        sys.executable,
        str(HERE / "launcher.py"),
        str(launch.exp_dir),
        "detached",
        "1",
        "--",
        "/no/such/program",
    ]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert answer.returncode == 2
    assert "launcher.log" in answer.stderr
    assert "/no/such/program" in (launch.exp_dir / "logs" / "launcher.log").read_text()
