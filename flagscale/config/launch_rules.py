"""Rules about how a job is launched: runner, hosts, Slurm, environment, profile. See `rules.py` for what a rule is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flagscale.config.errors import ConfigError, UserError
from flagscale.config.hostfile import Host, read_hostfile
from flagscale.config.schema import Config

_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED_ENVIRONMENT = ("FLAGSCALE_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OWN_SBATCH = {
    "nodes": "nnodes", "ntasks-per-node": "nproc_per_node", "partition": "slurm.partition", "account": "slurm.account",
    "qos": "slurm.qos", "time": "slurm.time_limit", "gpus-per-node": "slurm.gpus_per_node", "signal":
    "slurm.signal_before", "cpus-per-task": "slurm.cpus_per_task", "requeue": "slurm.requeue", "no-requeue":
    "slurm.requeue", "job-name": "exp_name", "output": "exp_dir", "error": "exp_dir", "open-mode": "exp_dir",
    "chdir": "exp_dir", "ntasks": "nproc_per_node",
}  # fmt: skip
"""sbatch options that a key sets already."""


def local_runner_is_one_machine(config: Config) -> Iterator[ConfigError]:
    """The local runner starts processes here only."""
    runner = config.experiment.runner
    if runner.type == "local" and runner.nnodes != 1:
        yield ConfigError(
            "experiment.runner.nnodes",
            runner.nnodes,
            "must be 1 for runner.type local, which starts processes on this machine only",
            "set nnodes to 1, or runner.type to ssh or slurm",
        )


def port_is_a_port(config: Config) -> Iterator[ConfigError]:
    """TCP ports are 16-bit numbers."""
    port = config.experiment.runner.master_port
    if port is not None and port > 65535:
        yield ConfigError("experiment.runner.master_port", port, "must be at most 65535", "use a free port, or null")


def hosts_are_named(config: Config) -> Iterator[UserError]:
    """The hostfile of the ssh runner exists, is well formed, and has as many machines as the job."""
    runner = config.experiment.runner
    if runner.type != "ssh":
        return
    if runner.hostfile is None:
        yield ConfigError(
            "experiment.runner.hostfile", None, "must be set for runner.type ssh", "name a file with one host a line"
        )
        return
    try:
        hosts = read_hostfile(Path(runner.hostfile))
    except UserError as error:
        yield from getattr(error, "errors", (error,))
        return
    if len(hosts) != runner.nnodes:
        yield ConfigError(
            "experiment.runner.nnodes",
            runner.nnodes,
            f"must be the number of hosts in {runner.hostfile}, {len(hosts)}",
            f"set nnodes to {len(hosts)}, or correct the hostfile",
        )
    yield from _short_of_slots(hosts, config)


def _short_of_slots(hosts: list[Host], config: Config) -> Iterator[ConfigError]:
    runner = config.experiment.runner
    for host in hosts:
        if host.slots is not None and host.slots < runner.nproc_per_node:
            yield ConfigError(
                "experiment.runner.nproc_per_node",
                runner.nproc_per_node,
                f"must be at most the slots of every host: {runner.hostfile}, line {host.line} gives {host.address} "
                f"slots={host.slots}",
                f"use {host.slots}, or raise the slots",
            )


def fewest_nodes_are_a_part(config: Config) -> Iterator[ConfigError]:
    """A restart goes on with at most all nodes."""
    runner = config.experiment.runner
    if runner.min_nnodes is not None and runner.min_nnodes > runner.nnodes:
        yield ConfigError(
            "experiment.runner.min_nnodes",
            runner.min_nnodes,
            f"must be at most nnodes {runner.nnodes}",
            f"use 1 to {runner.nnodes}, or null",
        )


def job_leaves_before_its_limit(config: Config) -> Iterator[ConfigError]:
    """A Slurm job is told before its time ends, and has run by then."""
    slurm = config.experiment.runner.slurm
    if slurm.time_limit is not None and slurm.signal_before >= 60 * slurm.time_limit:
        yield ConfigError(
            "experiment.runner.slurm.signal_before",
            slurm.signal_before,
            f"must be below the time limit of {60 * slurm.time_limit} s",
            "raise time_limit, or save nearer to its end",
        )


def sbatch_options_are_options(config: Config) -> Iterator[ConfigError]:
    """Further sbatch options are long ones, and set nothing that a key sets."""
    home = "experiment.runner.slurm.options"
    for option in config.experiment.runner.slurm.options:
        name = option.partition("=")[0].removeprefix("--")
        if not re.fullmatch(r"--[a-z][a-z0-9-]*(=[^\n]+)?", option):
            yield ConfigError(home, option, "is no long option of sbatch", "write --name=value or --name")
        elif name in _OWN_SBATCH:
            key = _OWN_SBATCH[name]
            place = f"experiment.{key}" if key.startswith("exp_") else f"experiment.runner.{key}"
            yield ConfigError(home, option, f"is what {place} sets", "use that key")


def environment_has_names(config: Config) -> Iterator[ConfigError]:
    """Variables have names that a shell accepts, and are none that the launcher gives every rank."""
    yield from _bad_names("experiment.envs", config.experiment.envs)
    for host, variables in config.experiment.node_envs.items():
        if isinstance(variables, Mapping):
            yield from _bad_names(f"experiment.node_envs.{host}", variables)


def _bad_names(place: str, variables: Mapping[Any, Any]) -> Iterator[ConfigError]:
    for name in variables:
        if not _ENVIRONMENT_NAME.fullmatch(str(name)):
            yield ConfigError(
                place,
                str(name),
                "is not a name for an environment variable",
                "use letters, digits and _ and no digit first",
            )
        elif name in _RESERVED_ENVIRONMENT:
            yield ConfigError(place, name, "is given to every process by the launcher itself", "remove it")
        elif isinstance(variables[name], str) and "\0" in variables[name]:
            yield ConfigError(f"{place}.{name}", "...", "holds a zero byte, which no variable can", "remove it")


def node_variables_are_of_hosts(config: Config) -> Iterator[ConfigError]:
    """Variables of single hosts name hosts of the hostfile."""
    home, runner = "experiment.node_envs", config.experiment.runner
    for host, variables in config.experiment.node_envs.items():
        if not isinstance(variables, Mapping):
            yield ConfigError(home, host, "must have a mapping of names and values", "write {host: {NAME: value}}")
    if runner.type != "ssh" or runner.hostfile is None:
        return
    try:
        known = [host.address for host in read_hostfile(Path(runner.hostfile))]
    except UserError:
        return  # reported by hosts_are_named
    for host in config.experiment.node_envs:
        if host not in known:
            yield ConfigError(home, host, f"is no host of {runner.hostfile}", f"use one of {', '.join(known)}")


def profile_is_a_span(config: Config) -> Iterator[ConfigError]:
    """Profiling starts and stops within the run."""
    profile, iterations = config.experiment.profile, config.model.train_iters
    start, stop = profile.start, profile.stop
    if (start is None) != (stop is None):
        missing = "start" if start is None else "stop"
        yield ConfigError(
            f"experiment.profile.{missing}", None, "must be given together with the other one", "give both or none"
        )
    elif start is not None and stop is not None and stop < start:
        yield ConfigError("experiment.profile.stop", stop, f"must be at least start {start}", f"use {start} or more")
    elif stop is not None and stop > iterations:
        yield ConfigError(
            "experiment.profile.stop", stop, f"must be at most train_iters {iterations}", f"use {iterations} or less"
        )


LAUNCH_RULES = (
    local_runner_is_one_machine,
    port_is_a_port,
    hosts_are_named,
    fewest_nodes_are_a_part,
    job_leaves_before_its_limit,
    sbatch_options_are_options,
    environment_has_names,
    node_variables_are_of_hosts,
    profile_is_a_span,
)
