"""From a plan to a job on the hosts of a hostfile: preflight, scripts, restarts, query and stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagscale.config.errors import UserError
from flagscale.config.hostfile import Host, read_hostfile
from flagscale.config.schema import Config
from flagscale.plan.build import plan_on_nodes
from flagscale.plan.plan import ExperimentPlan
from flagscale.plan.save import save_run_files
from flagscale.runner import control, failure, ssh
from flagscale.runner.background import Launch
from flagscale.runner.hosts import ask_all
from flagscale.runner.preflight import Findings, preflight, require_all
from flagscale.runner.progress import Console
from flagscale.runner.record import load_record
from flagscale.runner.render import Node, torchrun_command
from flagscale.runner.scripts import node_script

_MARGIN_S = 10.0
_POLL_S = 0.1


def launch(plan: ExperimentPlan, workdir: Path, console: Console) -> Launch:
    """Check all hosts, and give back what starts the job on them; the caller holds the folder's claim.

    Raises:
        UserError, UserErrors: no ssh, or hosts that cannot take part; nothing has been written or started then.
    """
    ssh.require_ssh()
    hosts = read_hostfile(Path(str(plan.config.experiment.runner.hostfile)))
    findings = preflight(plan.config, hosts, workdir)
    require_all(findings, console)
    return lambda console, started: _run(plan, findings, workdir, console, started)


def _run(
    plan: ExperimentPlan, findings: Sequence[Findings], workdir: Path, console: Console, started: Callable[[], None]
) -> int:
    """Run the job; when hosts are lost, again on those that are left, as often as `max_restarts` allows."""
    runner = plan.config.experiment.runner
    restarts_left = runner.max_restarts if runner.min_nnodes is not None else 0
    while True:
        outcome = ssh.run(_job(plan, findings, workdir), console, on_started=started)
        if outcome.code in (0, 2) or outcome.is_stopped or not restarts_left:
            break
        left = _those_left(plan.config, findings, workdir, console)
        fewer = None if left is None else _plan_on(plan.config, len(left), console)
        if left is None or fewer is None:
            break
        restarts_left -= 1
        plan, findings = fewer, left[: fewer.config.experiment.runner.nnodes]
        console.line(f"restart on {len(findings)} hosts; {restarts_left} restarts left")
    _finish(plan, outcome, console)
    return outcome.code


def _those_left(
    config: Config, findings: Sequence[Findings], workdir: Path, console: Console
) -> Sequence[Findings] | None:
    """The hosts that can go on after a failure; None when none was lost, so that a restart would fail again."""
    again = preflight(config, [found.host for found in findings], workdir)
    left = [found for found in again if not found.problems]
    for found in again:
        if found.problems:
            console.line(f"host {found.host.address} is left out: {found.problems[0]}")
    return left if len(left) < len(again) else None


def _plan_on(config: Config, most: int, console: Console) -> ExperimentPlan | None:
    """The plan on as many of `most` nodes as the rules allow; None when that is below `min_nnodes`."""
    fewest = config.experiment.runner.min_nnodes or config.experiment.runner.nnodes
    for nnodes in range(most, fewest - 1, -1):
        try:
            return plan_on_nodes(config, nnodes, torchrun_command)
        except UserError as error:
            console.line(f"no restart on {nnodes} nodes: {error}")
    console.line(f"no restart: {most} hosts are left, experiment.runner.min_nnodes is {fewest}")
    return None


def _job(plan: ExperimentPlan, findings: Sequence[Findings], workdir: Path) -> ssh.SshJob:
    """Write the plan, and render what each host gets."""
    config, runner = plan.config, plan.config.experiment.runner
    written = save_run_files(plan)
    copies = {str(path): path.read_text(encoding="utf-8") for path in written}
    head, port = findings[0].host.address, int(findings[0].facts["port"])
    requests = []
    for index, found in enumerate(findings):
        home = plan.exp_dir / "nodes" / found.host.label
        node = Node(index=index, home=home, address=found.host.address, head=head, port=port)
        script = node_script(plan, workdir, node, found.facts["cores"])
        requests.append(
            {
                "name": found.host.address,
                "exp_dir": str(plan.exp_dir),
                "home": str(home),
                "files": {**({} if found.facts["sees_exp_dir"] else copies), str(home / "launch.sh"): script},
                "stop_grace": runner.stop_grace,
                "train_iters": config.model.train_iters,
                "forward": not found.facts["sees_exp_dir"],
            }
        )
    return ssh.SshJob(
        exp_dir=plan.exp_dir,
        hosts=[found.host for found in findings],
        requests=requests,
        options=runner.ssh_options,
        train_iters=config.model.train_iters,
        log_interval=config.system.logging.log_interval,
        stop_grace=runner.stop_grace,
    )


def _finish(plan: ExperimentPlan, outcome: ssh.Outcome, console: Console) -> None:
    """Record and report how the job ended."""
    state = "stopped" if outcome.is_stopped else "finished" if outcome.code == 0 else "failed"
    message = failure.user_error(plan.exp_dir / "logs") if outcome.code == 2 else None
    if message is not None:
        console.line(f"error: {message}")
    elif outcome.is_stopped:
        console.line("ended; a run in this folder resumes from its newest checkpoint")
    elif outcome.code != 0:
        console.line(f"the job failed with exit code {outcome.code}; logs of each host: {plan.exp_dir / 'nodes'}")
    record = load_record(plan.exp_dir)
    assert record is not None, "ssh.run has written it"
    replace(record, state=state, exit_code=outcome.code, ended_at=time.time()).save(plan.exp_dir)


def query(config: Config, console: Console) -> int:
    """Show the state of the launcher and of every host, and the last iteration; 0."""
    exp_dir = Path(config.experiment.exp_dir)
    console.line(control.state_of(exp_dir))
    record = load_record(exp_dir)
    if record is None:
        return 0
    _ask_hosts(config, "query", console)
    control.show_last_iteration(exp_dir, record.train_iters, console, runs=record.is_alive)
    return 0


def stop(config: Config, console: Console) -> int:
    """End the run on all hosts, if one runs; 0 when nothing of it is left.

    The launcher is asked first when it runs here. Then every host ends what is left of the job there, as recorded in
    its own folder, so that this works after a launcher was killed too, and may be repeated.
    """
    exp_dir, grace = Path(config.experiment.exp_dir), config.experiment.runner.stop_grace
    record = load_record(exp_dir)
    if record is None:
        console.line(f"{exp_dir}: nothing to stop, never started")
        return 0
    if record.launcher_is_alive:
        os.kill(record.launcher_pid, signal.SIGTERM)
        deadline = time.monotonic() + grace + _MARGIN_S
        while record.launcher_is_alive and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    left = _ask_hosts(config, "stop", console)
    latest = load_record(exp_dir)
    if latest is not None and latest.state == "running" and not left:
        replace(latest, state="stopped", exit_code=128 + signal.SIGTERM, ended_at=time.time()).save(exp_dir)
    console.line(f"{exp_dir}: {'some hosts did not end the job' if left else 'stopped'}")
    return 1 if left else 0


def _ask_hosts(config: Config, action: str, console: Console) -> int:
    """Ask every host, show the answers, and return how many gave none."""
    runner, exp_dir = config.experiment.runner, Path(config.experiment.exp_dir)
    if runner.hostfile is None:
        raise UserError(f"experiment.runner.hostfile = null: action={action} asks the hosts; name the job's hostfile")
    hosts: list[Host] = read_hostfile(Path(runner.hostfile))
    requests: list[dict[str, Any]] = [
        {"home": str(exp_dir / "nodes" / host.label), "stop_grace": runner.stop_grace} for host in hosts
    ]
    answers = ask_all(hosts, action, requests, runner.ssh_options, runner.stop_grace + 4 * _MARGIN_S)
    for host, answer in zip(hosts, answers, strict=True):
        console.line(f"[{host.address}] {(answer.output or answer.complaint).strip()}")
    return sum(answer.code != 0 for answer in answers)
