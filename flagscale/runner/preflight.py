"""Before anything starts on any host: can every host take part? All of them are asked at once, all answers compared."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flagscale.config.errors import UserError, raise_all
from flagscale.config.hostfile import Host
from flagscale.config.schema import Config
from flagscale.runner import node
from flagscale.runner.hosts import LOST, Answer, ask_all
from flagscale.runner.progress import Console

TIMEOUT_S = 60.0
_NOT_FOUND = 127


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The preflight of one host: its facts, empty when it gave none, and what keeps it from taking part."""

    host: Host
    facts: Mapping[str, Any]
    problems: tuple[str, ...]


def preflight(config: Config, hosts: Sequence[Host], workdir: Path) -> list[Findings]:
    """Ask all hosts, and compare each with what the launcher has here."""
    runner, exp_dir = config.experiment.runner, Path(config.experiment.exp_dir)
    token = exp_dir / f".preflight-{uuid.uuid4().hex}"
    requests = [
        {
            "home": str(exp_dir / "nodes" / host.label),
            "exp_dir": str(exp_dir),
            "token": token.name,
            "entrypoint": config.experiment.task.entrypoint,
            "workdir": str(workdir),
            "port": runner.master_port if index == 0 else 0,
            "head": hosts[0].address,
        }
        for index, host in enumerate(hosts)
    ]
    here = node.facts({**requests[0], "port": 0})
    token.touch()
    try:
        answers = ask_all(hosts, "check", requests, runner.ssh_options, TIMEOUT_S)
    finally:
        token.unlink()
    found = [_findings(host, answer, here, config) for host, answer in zip(hosts, answers, strict=True)]
    return _with_one_platform(found, config)


def require_all(findings: Sequence[Findings], console: Console) -> None:
    """Show the table of what is wrong where.

    Raises:
        UserError, UserErrors: for each host that cannot take part.
    """
    if any(found.problems for found in findings):
        for line in table(findings):
            console.line(line)
    raise_all([UserError(f"host {found.host.address}: {problem}") for found in findings for problem in found.problems])


def table(findings: Sequence[Findings]) -> list[str]:
    """Host by host and what was found, as lines of text."""
    header = ("host", "python", "torch", "code", "GPUs", "cores", "result")
    rows = [header]
    for found in findings:
        facts = found.facts
        values = (facts.get("python"), facts.get("packages", {}).get("torch"), facts.get("code"), facts.get("gpus"))
        shown = [str(value) if value not in (None, "") else "-" for value in (*values, facts.get("cores"))]
        result = f"{len(found.problems)} problem{'s' if len(found.problems) > 1 else ''}" if found.problems else "ok"
        rows.append((found.host.address, *shown, result))  # type: ignore[arg-type]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _findings(host: Host, answer: Answer, here: Mapping[str, Any], config: Config) -> Findings:
    facts: dict[str, Any] = {}
    try:
        facts = json.loads(answer.output.strip().splitlines()[-1])
        problems = tuple(_problems(facts, here, config))
    except (ValueError, IndexError):
        problems = (_silent(answer),)
    return Findings(host=host, facts=facts, problems=problems)


def _with_one_platform(findings: list[Findings], config: Config) -> list[Findings]:
    """`system.platform` auto decides on each host: it must decide the same everywhere."""
    ranks = config.experiment.runner.nproc_per_node
    first = next((found for found in findings if found.facts), None)
    if config.system.platform != "auto" or first is None:
        return findings
    return [
        replace(
            found,
            problems=(
                *found.problems,
                f"has {found.facts['gpus']} GPUs and {first.host.address} {first.facts['gpus']} for {ranks} processes: "
                "system.platform auto would choose differently; set it to cuda or cpu",
            ),
        )
        if found.facts and (found.facts["gpus"] >= ranks) != (first.facts["gpus"] >= ranks)
        else found
        for found in findings
    ]


def _silent(answer: Answer) -> str:
    """Why a host gave no facts."""
    said = answer.complaint.splitlines()[-1] if answer.complaint else f"exit code {answer.code}"
    if answer.code == LOST:
        return f"cannot be reached ({said}); `ssh` to it must work without a question"
    if answer.code == _NOT_FOUND or "not found" in said:
        return f"has no such Python ({said}); install it at the same path as here"
    return f"cannot run flagscale ({said}); put the same code and environment at the same paths as here"


def _problems(facts: Mapping[str, Any], here: Mapping[str, Any], config: Config) -> Iterator[str]:
    runner, exp_dir = config.experiment.runner, config.experiment.exp_dir
    if facts["python"] != here["python"]:
        yield f"has Python {facts['python']}, here is {here['python']}; use the same"
    for name, version in here["packages"].items():
        if facts["packages"].get(name) != version:
            yield f"has {name} {facts['packages'].get(name)}, here is {version}; install the same"
    if facts["code"] != here["code"]:
        there = f"has other code ({facts['code']}, here {here['code']})" if facts["code"] else "has no entrypoint"
        yield f"{there}; copy flagscale and {config.experiment.task.entrypoint} there"
    if not facts["workdir"]:
        yield "has no folder like the working folder here; make it, or start from one that all hosts have"
    if not runner.no_shared_fs and not facts["sees_exp_dir"]:
        yield f"does not see experiment.exp_dir {exp_dir}; share it, or set experiment.runner.no_shared_fs"
    if not facts["can_write"]:
        yield f"cannot write experiment.exp_dir {exp_dir}; choose a folder that it can"
    if facts["busy"]:
        yield f"runs a job in {exp_dir} already; wait for it, or end it with action=stop"
    if facts["port"] is None:
        yield f"has no free port {runner.master_port}; set experiment.runner.master_port to another, or to null"
    if not facts["resolves"]:
        yield "does not know the first host's name; use addresses that every host resolves"
    if config.system.platform == "cuda" and facts["gpus"] < runner.nproc_per_node:
        yield f"has {facts['gpus']} GPUs for nproc_per_node {runner.nproc_per_node}; lower it, or use another host"
