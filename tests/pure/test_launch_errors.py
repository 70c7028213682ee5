"""Mistakes in hostfiles, runner settings and environments: one message each, exit code 2, nothing written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flagscale.config.hostfile import Host, parse_hostfile, read_hostfile
from flagscale.run import main
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
    ("a\x0bb\n", ["line 1", "'b' is not understood"]),
    ("a\u2028b\n", ["line 1", "'b' is not understood"]),
    ("a\0\nb\n", ["line 1", r"'a\x00' is no host name"]),
    ("a, b\n", ["line 1", "'a,' is no host name"]),
    ("node[1-2]\n", ["line 1", "'node[1-2]' is no host name"]),
    ("a slots = 4\nb\n", ["line 1", "'slots' is not understood"]),
    ("a slots=4 max_slots=4\nb\n", ["line 1", "'max_slots=4' is not understood"]),
    ("a slots=4.0\nb\n", ["line 1", "not '4.0'"]),
    ("a slots=\u0664\nb\n", ["line 1", "not '\u0664'"]),
    (f"a slots={'9' * 5000}\nb\n", ["line 1", "from 1 to 1024", "..."]),
    ("Node1\nnode1\n", ["line 2", "node1 is on line 1 already"]),
    ("fd00::1\n[FD00:0::1]\n", ["line 2", "FD00:0::1 is on line 1 already"]),
    ("me@a\nyou@a\n", ["line 2", "a is on line 1 already"]),
    (":::::\nb\n", ["line 1", "neither a host nor an IPv6 address"]),
    ("256.1.1.1\nb\n", ["line 1", "'256.1.1.1' is no IPv4 address"]),
    ("4\nb\n", ["line 1", "'4' is no IPv4 address"]),
    (f"{'a' * 64}.b\nb\n", ["line 1", "is no host name"]),
    ("a..b\nc\n", ["line 1", "'a..b' is no host name"]),
    ("ssh://a\nb\n", ["line 1", "port must be a whole number"]),
    ("a/b\nc\n", ["line 1", "'a/b' is no host name"]),
    ("a:+22\nb\n", ["line 1", "'+22'"]),
    ("me@you@a\nb\n", ["line 1", "'me@you' is no user name"]),
    ('{"a": 8}\n', ["line 1", "is no host name"]),
    ("- a\n- b\n", ["line 1", "'-' is no host name", "line 2"]),
]


@pytest.mark.parametrize("text", ["\ufeffa\nb\n", "a slots=4\r\nb slots=4\r\n", "a\tslots=4\nb\u00a0slots=4\n", "a\nb"])
def test_what_editors_make_of_a_hostfile(text: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(text.encode())
    assert [host.address for host in read_hostfile(tmp_path / "hosts")] == ["a", "b"]


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
    [
        (None, ["No such file"]),
        (b"\xff\xfe", ["no UTF-8 text"]),
        ("folder", ["Is a directory"]),
        ("pipe", ["is a pipe or device"]),
    ],
    ids=["missing", "bytes", "folder", "pipe"],
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
    elif content == "pipe":
        os.mkfifo(hostfile)  # as of `<(...)`: opening it would wait for ever
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
    (["experiment.runner.slurm.options=['--array=1-4']"], ["several times in one folder", "remove it"]),
    (["experiment.runner.slurm.options=['--wait']"], ["keeps sbatch from answering"]),
    (["experiment.runner.slurm.options=['--test-only']"], ["submits nothing", "action=dryrun"]),
    (["experiment.runner.slurm.options=['--wrap=ls']"], ["stands for a script"]),
    (["experiment.runner.type=slurm", "experiment.runner.slurm.gpus_per_node=2"],
     ["gpus_per_node = 2", "at least nproc_per_node 4", "use 4"]),
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
    (["experiment.runner.hostfile=''"], ["experiment.runner.hostfile = ''", "is empty"]),
    (["experiment.exp_dir=''"], ["experiment.exp_dir = ''", "is empty"]),
    (["experiment.exp_dir='~surely-no-user/x'"], ["exp_dir", "a user whom this machine does not know"]),
    ([f"experiment.exp_dir=/tmp/{'a' * 256}"], ["exp_dir", "longer than names (255 bytes)"]),
    ([f"experiment.exp_dir={'/a' * 2050}"], ["exp_dir", "paths (4095)"]),
    (["experiment.exp_dir='/tmp/a\nb'"], ["exp_dir", "a line break"]),
    (["experiment.exp_dir=/"], ["exp_dir = '/'", "a home of other things", "a folder of its own"]),
    ([f"experiment.exp_dir={ROOT}"], ["exp_dir", "so it is a project"]),
    (["experiment.runner.master_addr=''"], ["master_addr = ''", "no host name and no address"]),
    (["experiment.runner.master_addr=256.0.0.1"], ["master_addr", "no host name and no address"]),
    (["experiment.runner.master_addr='a b'"], ["master_addr", "no host name and no address"]),
    (["experiment.runner.ssh_options=[myhost]"], ["'myhost' (command line): is no option of ssh"]),
    (["experiment.runner.ssh_options=[--,x]"], ["'--' (command line): is no option of ssh"]),
    (["experiment.runner.ssh_options=[-i]"], ["'-i' (command line): lacks its value"]),
    (["experiment.runner.ssh_options=[-vi,key,other]"], ["'other' (command line): is no option of ssh"]),
    (["experiment.runner.ssh_options=[-4f]"], ["'-4f' (command line): keeps ssh from running the job"]),
    (["experiment.runner.ssh_options=[-tt]"], ["'-tt' (command line): mixes"]),
    (["experiment.runner.ssh_options=[-p22]"], ["'-p22' (command line): is the port of all hosts"]),
    (["experiment.runner.slurm.partition=''"], ["slurm.partition = ''", "is empty or holds a space"]),
    (["experiment.runner.slurm.account='a b'"], ["slurm.account = 'a b'", "holds a space"]),
    (["experiment.runner.slurm.qos='a\nb'"], ["slurm.qos", "holds a space"]),
    (["experiment.exp_name='a\nb'"], ["exp_name", "holds a line break"]),
    (["experiment.exp_name=''"], ["exp_name", "is empty"]),
    (["experiment.runner.slurm.signal_before=70000"], ["signal_before = 70000", "at most 65535"]),
    (["experiment.runner.slurm.gpus_per_node=a100:8"], ["must be a whole number or null"]),
    (["experiment.runner.nnodes='1:2'"], ["must be a whole number, not text"]),
    (["+experiment.envs.PET_NNODES=2"], ["'PET_NNODES'", "by the launcher itself"]),
    (["+experiment.envs.TORCHELASTIC_RUN_ID=2"], ["'TORCHELASTIC_RUN_ID'", "by the launcher itself"]),
    (["experiment.cmds.before_start='if true; then'"], ["cmds.before_start", "no whole bash command (syntax error"]),
    (["experiment.cmds.before_start='cat <<EOF'"], ["cmds.before_start", "here-document"]),
    (["experiment.cmds.after_stop='echo )'"], ["cmds.after_stop", "no whole bash command"]),
    (["experiment.cmds.before_start='ls) ; (ls'"], ["cmds.before_start", "no whole bash command (syntax error"]),
    (["experiment.cmds.before_start='ls \\ '"], ["cmds.before_start", "ends in a backslash"]),
    (["action=auto_tune"], ["auto_tune", "does not exist yet", "-m model.vision_micro_batch_size=2,4,8"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "parts"), RUNNERS, ids=lambda value: " ".join(value)[:60])
def test_broken_runner_settings_are_refused(
    project: Project, capsys: pytest.CaptureFixture[str], overrides: list[str], parts: list[str]
) -> None:
    project.write(BASE)
    message = refused(capsys, project.run(*overrides))
    for part in parts:
        assert part in message
    assert not (project.folder / "exp").exists()


# (what the YAML file says, what the message must say)
FILES = [
    ("experiment: {runner: {slurm: {time_limit: 4:00:00}}}", ["line 2", "4:00:00 is a number to the base of 60"]),
    ("experiment: {runner: {slurm: {options: [--a=b, 1:30]}}}", ["line 2", "1:30 is a number to the base of 60"]),
    ("model: {seed: 010}", ["line 2", "010 is a number to the base of 8"]),
    ("model: &a {seed: *a}", ["an alias stands inside what it names"]),
    ("model: {seed: !!python/object/apply:os.system ['true']}", ["line 2", "could not determine a constructor"]),
    ("---\nmodel: {seed: 1}", ["another document"]),
    ('experiment: {envs: {A: "${HOME}/x"}}', ["cannot be resolved", "${oc.env:NAME}"]),
    ("experiment: {envs: {A: !!binary aGk=}}", ["experiment.envs.A", "holds bytes"]),
    ("experiment: {envs: {A: [!!binary aGk=]}}", ["experiment.envs.A", "holds bytes"]),
    ('experiment: {envs: {A: "x\\0y"}}', ["experiment.envs.A", "zero byte"]),
    ("experiment: {envs: 'A=1'}", ["experiment.envs", "must be a mapping, not text"]),
    ('experiment: {exp_name: "a\\0b"}', ["experiment.exp_name", "holds a line break"]),
    ('experiment: {cmds: {before_start: "a\\0b"}}', ["before_start", "zero byte"]),
    ('experiment: {runner: {hostfile: "a\\0b"}}', ["runner.hostfile", "control character"]),
    ("experiment: {runner: {ssh_options: '-p 22'}}", ["must be a list of texts, not text"]),
    ("experiment: {runner: {ssh_options: [-o, 22]}}", ["must be a list of texts"]),
    ("experiment: {runner: {hosts: [a, b]}}", ["no known key", "experiment.runner.hostfile"]),
]


@pytest.mark.parametrize(("text", "parts"), FILES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_broken_files_are_refused(
    project: Project, capsys: pytest.CaptureFixture[str], text: str, parts: list[str]
) -> None:
    project.write(f"{BASE}{text}\n")
    message = refused(capsys, project.run())
    for part in parts:
        assert part in message
    assert message.count("mine.yaml") <= 1, "named once"


# (overrides, the key that has no effect)
IDLE = [
    (["experiment.runner.slurm.qos=x"], "experiment.runner.slurm.qos"),
    (["experiment.runner.no_shared_fs=true"], "experiment.runner.no_shared_fs"),
    (["experiment.node_envs={a: {B: 1}}"], "experiment.node_envs"),
    (["experiment.runner.type=slurm", "experiment.runner.stop_grace=3"], "experiment.runner.stop_grace"),
    ([*SSH, "experiment.runner.hostfile={hosts}", "experiment.runner.min_nnodes=1"], "experiment.runner.min_nnodes"),
]


@pytest.mark.parametrize(("overrides", "key"), IDLE, ids=lambda value: value if isinstance(value, str) else "")
def test_a_key_without_effect_is_told_once(
    project: Project, capsys: pytest.CaptureFixture[str], overrides: list[str], key: str
) -> None:
    project.write(BASE)
    (project.folder / "hosts").write_text("a\nb\n")
    assert project.run(*(text.format(hosts=project.folder / "hosts") if "{hosts" in text else text
                         for text in overrides)) == 0  # fmt: skip
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ") and key in line]
    assert len(notes) == 1
    assert "no effect" in notes[0]


@pytest.mark.parametrize("name", ["/tmp/conf/mine", "../conf/mine"])
def test_a_path_is_no_name(project: Project, capsys: pytest.CaptureFixture[str], name: str) -> None:
    project.write(BASE)
    assert "is a path; write --config-path FOLDER" in refused(capsys, main(["--config-name", name]))


def test_a_folder_with_a_file_of_the_users(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.write(BASE)
    (project.folder / "exp").mkdir()
    (project.folder / "exp/config.yaml").write_text("mine: 1\n")
    assert "a config.yaml without a plan.json, so it is no run's" in refused(capsys, project.run())
    assert (project.folder / "exp/config.yaml").read_text() == "mine: 1\n"


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


def test_secrets_are_hidden_in_a_runs_files_and_in_explain(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    envs = "{WANDB_API_KEY: abc123, PLAIN: seen, MY_TOKENS: {a: [abc123]}, USERS: [{password: abc123, name: seen}]}"
    project.write(f"{BASE}experiment: {{envs: {envs}, node_envs: {{keyhost: {{MY_KEY: abc123, NAME: seen}}}}}}\n")
    assert project.run() == 0
    for key in ("experiment.envs", "experiment.envs.WANDB_API_KEY", "experiment.node_envs"):
        assert project.run("action=explain", f"key={key}") == 0
    written = "".join(path.read_text() for path in (project.folder / "exp").iterdir() if path.is_file())
    for text in (capsys.readouterr().out, written):
        assert "abc123" not in text
    assert "<hidden>" in written
    assert written.count("seen") == 6, "three in each of config.yaml and plan.json"


def test_a_dry_run_prints_the_batch_script(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """As it would be given to sbatch, and no script where nothing would be given to another program."""
    project.write("defaults: [/qwen35_mimo, _self_]\n")
    slurm = ("experiment.runner.type=slurm", "experiment.runner.nnodes=2", "experiment.runner.nproc_per_node=2")
    assert project.run(*slurm, "experiment.runner.slurm.partition=gpu") == 0
    printed = capsys.readouterr().out
    assert {"#!/usr/bin/env bash", "#SBATCH --nodes=2", "#SBATCH --partition=gpu"} <= set(printed.splitlines())
    assert "srun" in printed
    assert project.run() == 0
    assert "#SBATCH" not in capsys.readouterr().out
