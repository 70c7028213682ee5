"""Mistakes in what surrounds the program: its shell, rights, missing programs, addresses; one message, exit code 2."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flagscale.run import main
from tests.pure.test_config_errors import BASE, refused
from tests.pure.yaml_files import Project, project

__all__ = ["project"]
ROOT = Path(__file__).resolve().parents[2]


# (runner settings, programs that are missing, what the message must say)
ENVIRONMENTS = [
    ("experiment.runner.type=slurm", ["sbatch, scontrol, scancel not found", "login node"]),
    ("experiment.runner.type=ssh", ["no ssh client"]),
]


@pytest.mark.parametrize(("runner", "parts"), ENVIRONMENTS)
def test_missing_programs(
    project: Project,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
    parts: list[str],
) -> None:
    project.write(BASE)
    hostfile = project.folder / "hosts"
    hostfile.write_text("127.0.0.1\n")
    monkeypatch.setenv("PATH", str(project.folder))
    message = refused(capsys, project.run(runner, f"experiment.runner.hostfile={hostfile}", "action=run"))
    assert all(part in message for part in parts)
    assert not (project.folder / "exp/plan.json").exists()


# (overrides, what the message must say)
MEETING_PLACES = [
    (["experiment.runner.master_addr=surely-no-host.invalid"], ["master_addr", "is not known here"]),
    (["experiment.runner.master_addr=192.0.2.1"], ["master_addr", "is no address of this machine"]),
    (["experiment.runner.master_port={port}"], ["master_port", "is in use", "null for any free one"]),
]


@pytest.mark.parametrize(("overrides", "parts"), MEETING_PLACES)
def test_no_place_to_meet(
    project: Project, capsys: pytest.CaptureFixture[str], overrides: list[str], parts: list[str]
) -> None:
    project.write(BASE)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        message = refused(capsys, project.run("action=run", *(text.format(port=port) for text in overrides)))
    assert all(part in message for part in parts), message
    assert not (project.folder / "exp/plan.json").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        # Any file passes for data here: the folder is refused before a sample is read.
        (
            ["experiment.exp_dir=/proc/x", f"data.train_path={__file__}", f"data.valid_path={__file__}"],
            ["experiment.exp_dir", "cannot be written"],
        ),
        (["model.lr=x"], ["must be a number"]),
        (["--config-name", "nothing"], ["no such file"]),
        (["--no-such-option"], ["unrecognized arguments"]),
    ],
)
def test_the_program_itself_ends_with_two_and_no_traceback(arguments: list[str], parts: list[str]) -> None:
    """The whole program, as a user starts it."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *arguments], capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert all(part in done.stderr for part in parts), done.stderr


# (what the shell does before, its redirections, exit codes that are well, what standard error must say)
SURROUNDINGS = [
    ("mkdir gone && cd gone && rmdir ../gone", "", (2,), "the working folder no longer exists"),
    ("chmod 000 data", "", (2,), "data/samples.jsonl: Permission denied"),
    ("touch e.py && chmod 000 e.py", "experiment.task.entrypoint=e.py", (2,), "e.py' (command line): may not be read"),
    ("mkdir -p exp && chmod 500 exp", "", (2,), "cannot be written (Permission denied)"),
    ("mkdir -p exp/run.json", "", (2,), "exp/run.json: Is a directory"),
    ("mkdir -p exp/plan.json", "", (2,), "cannot be written (Is a directory)"),
    ("ln -s exp exp", "", (2,), "cannot be written"),
    ("export LC_ALL=C PYTHONIOENCODING=ascii PYTHONUTF8=0 COLUMNS=x TERM=", "", (0,), ""),
    ("unset HOME", ">&-", (0,), ""),
    ("", ">/dev/full", (2,), "the output cannot be written: No space left on device"),
    ("", "2>&- model.lr=x", (2,), ""),
    ("set -o pipefail", "| true", (0, 1, 128 + 13), ""),
]


@pytest.mark.parametrize(("before", "after", "codes", "said"), SURROUNDINGS, ids=lambda value: str(value)[:30])
def test_surroundings(before: str, after: str, codes: tuple[int, ...], said: str, tmp_path: Path) -> None:
    """The whole program in an odd shell, with the rights of an ordinary user."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/samples.jsonl").write_text("{}\n")
    data = f"data.train_path={tmp_path}/data/samples.jsonl data.valid_path={tmp_path}/data/samples.jsonl"
    ordinary = "setpriv --bounding-set=-dac_override,-dac_read_search" if os.geteuid() == 0 else ""
    program = f"{ordinary} {sys.executable} {ROOT}/run.py action=dryrun"
    command = f"{program} experiment.exp_dir={tmp_path}/exp {data} {after}"
    done = subprocess.run(
        ["bash", "-c", f"{before}\n{command}"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    (tmp_path / "data").chmod(0o700)
    assert done.returncode in codes, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == (1 if said else 0)


def test_interrupted_while_it_plans(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flagscale.config.loading.load", interrupted)
    assert main(["action=dryrun"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "error: interrupted\n"
