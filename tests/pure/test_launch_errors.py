"""Mistakes in hostfiles, runner settings and environments: one message each, exit code 2, nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flagscale.config.hostfile import Host, parse_hostfile
from tests.pure.test_config_errors import BASE, refused
from tests.pure.yaml_files import Project, project

__all__ = ["project"]
ROOT = Path(__file__).resolve().parents[2]
SSH = ("experiment.runner.type=ssh", "experiment.runner.nnodes=2")


def test_every_form_of_a_host() -> None:
    text = """# two kinds of comments
    node-1 slots=8   # the first
    me@node2.cluster:2222
    10.0.0.3:22 slots=4
    [fd00::4]:2200 slots=1
    fe80::5%eth0

    root@[fd00::6]
    """
    assert parse_hostfile(text, "hosts") == [
        Host(address="node-1", slots=8, line=2),
        Host(address="node2.cluster", user="me", port=2222, line=3),
        Host(address="10.0.0.3", port=22, slots=4, line=4),
        Host(address="fd00::4", port=2200, slots=1, line=5),
        Host(address="fe80::5%eth0", line=6),
        Host(address="fd00::6", user="root", line=8),
    ]


# (text of the hostfile, what the message must say)
HOSTFILES = [
    ("", ["names no host", "[user@]host[:port] [slots=N]"]),
    ("# only a comment\n\n", ["names no host"]),
    ("a slots=8\nb slot=8\n", ["line 2", "'slot=8' is not understood"]),
    ("a\nb 8\n", ["line 2", "'8' is not understood"]),
    ("a slots=\nb\n", ["line 1", "slots must be a whole number", "not ''"]),
    ("a slots=eight\nb\n", ["line 1", "not 'eight'"]),
    ("a slots=0\nb\n", ["line 1", "from 1 to 1024", "'0'"]),
    ("a slots=-4\nb\n", ["line 1", "'-4'"]),
    ("a slots=4 slots=4\nb\n", ["line 1", "slots is given twice"]),
    ("a:\nb\n", ["line 1", "port must be a whole number", "''"]),
    ("a:ssh\nb\n", ["line 1", "port", "'ssh'"]),
    ("a:70000\nb\n", ["line 1", "from 1 to 65535"]),
    ("@a\nb\n", ["line 1", "'' is no user name"]),
    ("m e@a\nb\n", ["line 1", "'e@a' is not understood"]),
    ("-oProxyCommand=x\nb\n", ["line 1", "is no host name"]),
    ("a_\nb\n", ["line 1", "'a_' is no host name"]),
    ("a,b\n", ["line 1", "'a,b' is no host name"]),
    ("[fd00::1\nb\n", ["line 1", "no IPv6 address in brackets"]),
    ("[fd00::1]22\nb\n", ["line 1", "no IPv6 address in brackets"]),
    ("fd00::g\nb\n", ["line 1", "neither a host nor an IPv6 address"]),
    ("a\nb\na slots=2\n", ["line 3", "a is on line 1 already"]),
    ("a slots=x\nb slots=y\n", ["line 1", "line 2"]),
    ("a\n", ["nnodes = 2", "the number of hosts", "set nnodes to 1"]),
    ("a\nb\nc\n", ["nnodes = 2", "set nnodes to 3"]),
    ("a slots=8\nb slots=2\n", ["nproc_per_node = 4", "line 2 gives b slots=2", "use 2"]),
]


@pytest.mark.parametrize(("text", "parts"), HOSTFILES, ids=lambda value: repr(value)[:40])
def test_a_broken_hostfile_is_refused(
    project: Project, capsys: pytest.CaptureFixture[str], text: str, parts: list[str]
) -> None:
    project.write(BASE)
    hostfile = project.folder / "hosts"
    hostfile.write_text(text)
    message = refused(capsys, project.run(*SSH, f"experiment.runner.hostfile={hostfile}"))
    for part in parts:
        assert part in message
    if "names no host" not in message and "nnodes" not in message and "nproc" not in message:
        assert f"{hostfile}, line " in message


@pytest.mark.parametrize(
    ("content", "parts"),
    [(None, ["No such file"]), (b"\xff\xfe", ["no UTF-8 text"]), ("folder", ["Is a directory"])],
    ids=["missing", "bytes", "folder"],
)
def test_a_hostfile_that_cannot_be_read(
    project: Project, capsys: pytest.CaptureFixture[str], content: bytes | str | None, parts: list[str]
) -> None:
    project.write(BASE)
    hostfile = project.folder / "hosts"
    if isinstance(content, bytes):
        hostfile.write_bytes(content)
    elif content == "folder":
        hostfile.mkdir()
    message = refused(capsys, project.run(*SSH, f"experiment.runner.hostfile={hostfile}"))
    assert all(part in message for part in [str(hostfile), *parts]), message


# (overrides, what the message must say)
RUNNERS = [
    (["experiment.runner.type=ssh"], ["hostfile = null", "name a file with one host a line"]),
    (["experiment.runner.type=cluster"], ["must be one of local, ssh, slurm"]),
    (["experiment.runner.nnodes=2"], ["set nnodes to 1, or runner.type to ssh or slurm"]),
    (["experiment.runner.nnodes=0"], ["must be at least 1"]),
    (["experiment.runner.max_restarts=-1"], ["must be at least 0"]),
    (["experiment.runner.min_nnodes=3", "experiment.runner.type=slurm", "experiment.runner.nnodes=2"],
     ["min_nnodes = 3", "at most nnodes 2"]),
    (["experiment.runner.min_nnodes=1", "experiment.runner.type=slurm", "experiment.runner.nnodes=2",
      "model.tensor_model_parallel_size=4", "experiment.runner.nproc_per_node=2"],
     ["min_nnodes = 1", "a restart with 1 nodes breaks a rule", "world size 2"]),
    (["experiment.runner.slurm.time_limit=0"], ["must be at least 1"]),
    (["experiment.runner.slurm.time_limit=2", "experiment.runner.slurm.signal_before=120"],
     ["signal_before = 120", "time limit of 120 s"]),
    (["experiment.runner.slurm.time_limit='1:00:00'"], ["must be a whole number or null, not text"]),
    (["experiment.runner.slurm.options=['-p gpu']"], ["'-p gpu'", "no long option of sbatch"]),
    (["experiment.runner.slurm.options=['--time=3']"], ["what experiment.runner.slurm.time_limit sets"]),
    (["experiment.runner.slurm.options=['--nodes=3']"], ["what experiment.runner.nnodes sets"]),
    (["experiment.runner.slurm.options=['--output=x']"], ["what experiment.exp_dir sets"]),
    (["experiment.runner.slurm.partitions=x"], ["no known key", "experiment.runner.slurm.partition"]),
    (["experiment.runner.ssh_options=-v"], ["must be a list of texts"]),
    (["experiment.runner.stop_grace=-1"], ["must be at least 0"]),
    (["experiment.runner.detach=1"], ["must be true or false"]),
    (["experiment.cmds.before=ls"], ["no known key", "experiment.cmds.before_start"]),
    (["+experiment.envs.RANK=3"], ["'RANK'", "by the launcher itself"]),
    (["+experiment.envs.TOKEN=a", "experiment.envs={TOKEN: b}"], ["experiment.envs.TOKEN = '<hidden>'", "twice"]),
    (["experiment.node_envs={a: 3}"], ["'a'", "must have a mapping"]),
    (["experiment.node_envs={a: {B C: 3}}"], ["experiment.node_envs.a", "'B C'"]),
    (["experiment.profile.start=3"], ["profile.stop = null", "give both or none"]),
    (["experiment.profile.start=3", "experiment.profile.stop=2"], ["stop = 2", "at least start 3"]),
    (["experiment.profile.start=3", "experiment.profile.stop=3000"], ["at most train_iters 240"]),
    (["experiment.profile.start=0", "experiment.profile.stop=2"], ["must be at least 1"]),
    (["action=auto_tune"], ["auto_tune", "does not exist yet", "-m model.vision_micro_batch_size=2,4,8"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "parts"), RUNNERS, ids=lambda value: " ".join(value)[:60])
def test_broken_runner_settings_are_refused(
    project: Project, capsys: pytest.CaptureFixture[str], overrides: list[str], parts: list[str]
) -> None:
    project.write(BASE)
    began = time.process_time()
    message = refused(capsys, project.run(*overrides))
    assert time.process_time() - began < 3
    for part in parts:
        assert part in message
    assert not (project.folder / "exp").exists()


@pytest.mark.parametrize("name", ["A B", "1A", "A=B", "", "A;id"])
def test_no_name_of_a_variable(project: Project, capsys: pytest.CaptureFixture[str], name: str) -> None:
    project.write(f"{BASE}experiment: {{envs: {{'{name}': x}}}}\n")
    message = refused(capsys, project.run())
    assert f"experiment.envs = '{name}': is not a name for an environment variable" in message


def test_variables_of_an_unknown_host(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.write(BASE)
    hostfile = project.folder / "hosts"
    hostfile.write_text("a\nb\n")
    overrides = [*SSH, f"experiment.runner.hostfile={hostfile}", "experiment.node_envs={c: {A: 1}}"]
    message = refused(capsys, project.run(*overrides))
    assert "'c' (command line): is no host of" in message
    assert "use one of a, b" in message


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


def test_secrets_are_hidden_in_a_runs_files_and_in_explain(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write(BASE + "experiment: {envs: {WANDB_API_KEY: abc123, PLAIN: seen}}\n")
    assert project.run() == 0
    assert project.run("action=explain", "key=experiment.envs") == 0
    written = "".join(path.read_text() for path in (project.folder / "exp").iterdir() if path.is_file())
    for text in (capsys.readouterr().out, written):
        assert "abc123" not in text
    assert "<hidden>" in written
    assert "seen" in written
