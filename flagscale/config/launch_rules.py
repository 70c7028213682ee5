"""Rules about how a job is launched: runner, hosts, Slurm, environment, profile. See `rules.py` for what a rule is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flagscale.config.errors import ConfigError, UserError
from flagscale.config.hostfile import Host, is_address, read_hostfile
from flagscale.config.schema import Config

_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED_ENVIRONMENT = re.compile(
    "FLAGSCALE_RUN_ID|(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|(PET|TORCHELASTIC)_.*"
)
_OWN_SBATCH = {
    "nodes": "nnodes", "ntasks-per-node": "nproc_per_node", "partition": "slurm.partition", "account": "slurm.account",
    "qos": "slurm.qos", "time": "slurm.time_limit", "gpus-per-node": "slurm.gpus_per_node", "signal":
    "slurm.signal_before", "cpus-per-task": "slurm.cpus_per_task", "requeue": "slurm.requeue", "no-requeue":
    "slurm.requeue", "job-name": "exp_name", "output": "exp_dir", "error": "exp_dir", "open-mode": "exp_dir",
    "chdir": "exp_dir", "ntasks": "nproc_per_node",
}  # fmt: skip
"""sbatch options that a key sets already."""
_SBATCH_REFUSED = {
    "array": "starts the same run several times in one folder; write a sweep with -m instead",
    "wait": "keeps sbatch from answering, which run.py waits for; without it run.py follows the job anyway",
    "test-only": "submits nothing; use action=dryrun",
    "wrap": "stands for a script, which run.py writes itself",
}
"""sbatch options with which it does not submit one job and say its number at once."""
_SSH_WITH_VALUE = "BbcDEeFIiJLlmoPpQRSwW"
"""Options of ssh (as of OpenSSH 10) that take a value: `-p22` or `-p` and then `22`."""
_SSH_REFUSED = {
    **dict.fromkeys("fNnsWO", "keeps ssh from running the job and handing it its plan"),
    **dict.fromkeys("GQV", "makes ssh print something and end"),
    "t": "mixes the job's lines with those of a terminal",
    "p": "is the port of all hosts, which the hostfile says for each",
    "l": "is the user of all hosts, which the hostfile says for each",
}
_LONGEST_SIGNAL_S = 65535
_OF_A_PROJECT = (".git", "pyproject.toml", "setup.py")


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


def address_is_an_address(config: Config) -> Iterator[ConfigError]:
    """The local ranks meet at a name or an address."""
    address = config.experiment.runner.master_addr
    if not is_address(address):
        yield ConfigError(
            "experiment.runner.master_addr", address, "is no host name and no address", "use 127.0.0.1"
        )


def folder_is_for_a_run(config: Config) -> Iterator[ConfigError]:
    """A run writes `config.yaml` and more into its folder, where nothing of the user's may be."""
    exp_dir = Path(config.experiment.exp_dir)
    project = next((name for name in _OF_A_PROJECT if (exp_dir / name).exists()), None)
    if project is not None or exp_dir in (Path("/"), Path(os.path.expanduser("~"))):
        what = f"holds {project}, so it is a project" if project else "is a home of other things"
    elif (exp_dir / "config.yaml").exists() and not (exp_dir / "plan.json").exists():
        what = "holds a config.yaml without a plan.json, so it is no run's"
    else:
        return
    yield ConfigError(
        "experiment.exp_dir", str(exp_dir), f"{what}; a run would write over files there", "use a folder of its own"
    )


def ssh_options_are_options(config: Config) -> Iterator[ConfigError]:
    """Further options of ssh begin with a dash; the first other word would be taken for the host."""
    home, is_value = "experiment.runner.ssh_options", False
    for option in config.experiment.runner.ssh_options:
        if is_value:
            is_value = False
            continue
        letters = option[1:]
        if not option.startswith("-") or not letters or letters.startswith("-"):
            yield ConfigError(home, option, "is no option of ssh", "write -x, or -x and its value as two entries")
            return
        taking = next((letter for letter in letters if letter in _SSH_WITH_VALUE), None)
        before = letters.partition(taking)[0] + taking if taking else letters
        refused = next((letter for letter in before if letter in _SSH_REFUSED), None)
        if refused is not None:
            yield ConfigError(home, option, _SSH_REFUSED[refused], "remove it")
        is_value = taking is not None and letters.endswith(taking) and before == letters
    if is_value:
        yield ConfigError(home, config.experiment.runner.ssh_options[-1], "lacks its value", "add it as an entry")


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


def sbatch_texts_are_words(config: Config) -> Iterator[ConfigError]:
    """What becomes an `#SBATCH` line is one line and not empty."""
    slurm = config.experiment.runner.slurm
    texts = {"slurm.partition": slurm.partition, "slurm.account": slurm.account, "slurm.qos": slurm.qos}
    for key, text in texts.items():
        if text is not None and not re.fullmatch(r"[^\s\x00-\x1f]+", text):
            yield ConfigError(
                f"experiment.runner.{key}", text, "is empty or holds a space", "use the name that Slurm knows, or null"
            )
    name = config.experiment.exp_name
    if not name.strip() or any(ord(character) < 32 for character in name):
        yield ConfigError("experiment.exp_name", name, "is empty or holds a line break", "use a name of one line")
    if slurm.signal_before > _LONGEST_SIGNAL_S:
        yield ConfigError(
            "experiment.runner.slurm.signal_before",
            slurm.signal_before,
            f"must be at most {_LONGEST_SIGNAL_S}, as for sbatch",
            "save nearer to the end",
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
        elif name in _SBATCH_REFUSED:
            yield ConfigError(home, option, _SBATCH_REFUSED[name], "remove it")


def slurm_gives_gpus_for_all_ranks(config: Config) -> Iterator[ConfigError]:
    """Each rank has a GPU of its own, unless all are on the CPU."""
    runner = config.experiment.runner
    gpus = runner.slurm.gpus_per_node
    if runner.type == "slurm" and config.system.platform != "cpu" and gpus is not None and gpus < runner.nproc_per_node:
        yield ConfigError(
            "experiment.runner.slurm.gpus_per_node",
            gpus,
            f"must be at least nproc_per_node {runner.nproc_per_node}",
            f"use {runner.nproc_per_node}, or set system.platform to cpu",
        )


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
        elif _RESERVED_ENVIRONMENT.fullmatch(name):
            yield ConfigError(place, name, "is given to every process by the launcher itself", "remove it")
        elif isinstance(variables[name], str) and "\0" in variables[name]:
            yield ConfigError(f"{place}.{name}", "...", "holds a zero byte, which no variable can", "remove it")
        elif not _is_plain(variables[name]):
            yield ConfigError(f"{place}.{name}", "...", "holds bytes", "write text, a number, a list or a mapping")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list) else not isinstance(value, bytes)


def commands_are_bash(config: Config) -> Iterator[ConfigError]:
    """What runs around the job is complete: an open quote or here-document would swallow the job itself."""
    bash, cmds = shutil.which("bash"), config.experiment.cmds
    for name, text in (("before_start", cmds.before_start), ("after_stop", cmds.after_stop)):
        if not text or bash is None:
            continue
        if "\0" in text:
            said = "it holds a zero byte"
        elif re.search(r"(?<!\\)(\\\\)*\\$", text.strip()):
            said = "it ends in a backslash, which takes the next line in"
        else:
            checked = subprocess.run(
                [bash, "-n"], input=f"{text}\n", capture_output=True, text=True, errors="replace", check=False
            )
            said = re.sub(r"^\S*bash: (line \d+: )?", "", checked.stderr.strip().split("\n")[0])
        if said:
            yield ConfigError(f"experiment.cmds.{name}", text, f"is no whole bash command ({said})", "correct it")


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
    address_is_an_address,
    folder_is_for_a_run,
    ssh_options_are_options,
    hosts_are_named,
    fewest_nodes_are_a_part,
    job_leaves_before_its_limit,
    sbatch_texts_are_words,
    sbatch_options_are_options,
    slurm_gives_gpus_for_all_ranks,
    environment_has_names,
    commands_are_bash,
    node_variables_are_of_hosts,
    profile_is_a_span,
)
