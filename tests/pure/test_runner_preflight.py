"""What the preflight finds in the answers of hosts; the answers themselves come from real servers in tests/runner."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flagscale.config.errors import UserErrors
from flagscale.config.hostfile import Host
from flagscale.config.schema import Config, ExperimentConfig, RunnerConfig, SystemConfig
from flagscale.runner import preflight, scripts
from flagscale.runner.hosts import Answer, ssh_command
from flagscale.runner.preflight import Findings, table
from flagscale.runner.progress import Console

GOOD = {
    "python": "3.12.1", "packages": {"torch": "2.14.1", "numpy": "2.4"}, "code": "abc", "cores": 64, "gpus": 8,
    "workdir": True, "sees_exp_dir": True, "can_write": True, "busy": False, "port": 29500, "resolves": True,
}  # fmt: skip


def config(platform: str = "cpu", **runner: Any) -> Config:
    experiment = ExperimentConfig(exp_dir="/runs/x", runner=RunnerConfig(type="ssh", nproc_per_node=8, **runner))
    return Config(experiment=experiment, system=SystemConfig(platform=platform), model=None, data=None)  # type: ignore[arg-type]


def findings(answers: list[Answer], configuration: Config, monkeypatch: pytest.MonkeyPatch, tmp: Any) -> list[Findings]:
    """The preflight with answers that hosts might give."""
    exp = replace(configuration.experiment, exp_dir=str(tmp))
    monkeypatch.setattr(preflight, "ask_all", lambda *_: answers)
    monkeypatch.setattr(preflight.node, "facts", lambda _: GOOD)
    hosts = [Host(address=f"node{number}") for number in range(len(answers))]
    found = preflight.preflight(replace(configuration, experiment=exp), hosts, tmp)
    assert list(tmp.iterdir()) == [], "the mark is gone"
    return found


def answer(**different: Any) -> Answer:
    return Answer(code=0, output=json.dumps({**GOOD, **different}) + "\n", complaint="")


# (what differs on the second host, what is said of it)
DIFFERENCES = [
    ({"python": "3.12.9"}, "has Python 3.12.9, here is 3.12.1; use the same"),
    ({"packages": {"torch": "2.11", "numpy": "2.4"}}, "has torch 2.11, here is 2.14.1; install the same"),
    ({"packages": {"numpy": "2.4"}}, "has torch None"),
    ({"code": "abd"}, "has other code (abd, here abc)"),
    ({"code": ""}, "has no entrypoint"),
    ({"workdir": False}, "has no folder like the working folder here"),
    ({"sees_exp_dir": False}, "share it, or set experiment.runner.no_shared_fs"),
    ({"can_write": False}, "cannot write experiment.exp_dir"),
    ({"busy": True}, "runs a job in"),
    ({"port": None}, "has no free port"),
    ({"resolves": False}, "does not know the first host's name"),
    ({"gpus": 4}, "has 4 GPUs for nproc_per_node 8"),
]


@pytest.mark.parametrize(("different", "message"), DIFFERENCES, ids=lambda value: str(value)[:30])
def test_a_host_that_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, different: dict[str, Any], message: str
) -> None:
    first, second = findings([answer(), answer(**different)], config("cuda"), monkeypatch, tmp_path)
    assert first.problems == ()
    assert len(second.problems) == 1
    assert message in second.problems[0]


def test_auto_must_choose_alike_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    found = findings([answer(), answer(gpus=0), answer()], config("auto"), monkeypatch, tmp_path)
    assert [len(one.problems) for one in found] == [0, 1, 0]
    assert "has 0 GPUs and node0 8 for 8 processes" in found[1].problems[0]


@pytest.mark.parametrize(
    ("code", "complaint", "message"),
    [
        (255, "ssh: connect to host node0 port 22: No route to host", "cannot be reached"),
        (127, "sh: 1: exec: /venv/bin/python: not found", "has no such Python"),
        (1, "No module named flagscale", "cannot run flagscale"),
        (0, "", "cannot run flagscale (exit code 0)"),
    ],
)
def test_a_host_without_an_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, code: int, complaint: str, message: str
) -> None:
    (found,) = findings([Answer(code=code, output="", complaint=complaint)], config(), monkeypatch, tmp_path)
    assert message in found.problems[0]
    assert complaint in found.problems[0]


def test_all_problems_are_told_with_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = findings([answer(busy=True, port=None), answer(busy=True), answer()], config(), monkeypatch, tmp_path)
    with pytest.raises(UserErrors) as caught:
        preflight.require_all(found, Console(sys.stdout))
    assert len(caught.value.errors) == 3
    assert capsys.readouterr().out.splitlines() == table(found)
    assert [line.split()[-1] for line in table(found)[1:]] == ["problems", "problem", "ok"]


def test_only_a_checkout_is_put_on_pythonpath(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of one interpreter must not reach another one that a job starts."""
    checkout = Path(__file__).parents[2]
    host = Host(address="a")
    assert scripts.import_root() == checkout
    assert f"PYTHONPATH={checkout} exec" in ssh_command(host, "run", [])[-1]
    monkeypatch.setattr(scripts.site, "getsitepackages", lambda: [str(checkout)])
    assert scripts.import_root() is None
    assert "PYTHONPATH" not in ssh_command(host, "run", [])[-1]


def test_ssh_command() -> None:
    host = Host(address="fd00::2", user="me", port=2222)
    command = ssh_command(host, "run", ["-i", "/a key"], python="/my venv/bin/python")
    assert command[0] == "ssh"
    assert command[-4:-1] == ["2222", "--", "me@fd00::2"]
    assert command[command.index("-i") : command.index("-i") + 2] == ["-i", "/a key"]
    assert "BatchMode=yes" in command
    assert command[-1].startswith("exec sh -c ")
