"""A configuration -> the text that starts it: the torchrun command, the environment, the launch script.

Pure functions: nothing is read from the machine and nothing is written, so that `action=dryrun` shows exactly what
a run would start. Everything that reaches a shell goes through `shlex.quote`.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.config.schema import CmdsConfig, Config, RunnerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine of a job of several, as torchrun sees it."""

    index: int
    home: Path
    """Folder of the node's script, logs and record, `exp_dir/nodes/<host>`."""
    address: str
    """Under which the other nodes reach this one."""
    head: str
    """Address of the first node."""
    port: int

    @property
    def endpoint(self) -> str:
        """Where the nodes meet."""
        return _endpoint(self.head, self.port)


def torchrun_command(
    config: Config, exp_dir: Path, *, python: str = sys.executable, node: Node | None = None
) -> list[str]:
    """The argument list that starts all ranks of a machine.

    Without a node, a runner of several machines leaves out what only the machine knows (where the nodes meet, its
    own address and log folder); Slurm's script gives that in torchrun's `PET_` variables.

    Args:
        config: the whole configuration; its entrypoint may be relative to the working folder of the launch.
        exp_dir: the run's folder, absolute; it receives each rank's output under `logs/`.
        python: interpreter of the ranks.
        node: the machine, when several take part.
    """
    runner = config.experiment.runner
    home = node.home if node else exp_dir if runner.type == "local" else None
    return [
        python,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(runner.nnodes),
        "--nproc_per_node",
        str(runner.nproc_per_node),
        *_rendezvous(runner, node),
        *(["--max-restarts", str(runner.max_restarts)] if runner.max_restarts else []),
        *(["--log-dir", str(home / "logs")] if home else []),
        "--redirects",
        "3",
        config.experiment.task.entrypoint,
        "--plan",
        str(exp_dir / "plan.json"),
    ]


def _rendezvous(runner: RunnerConfig, node: Node | None) -> list[str]:
    """How the ranks find each other.

    On one machine port 0 lets the operating system choose while it binds, which cannot lose a race as a port probed
    beforehand can. `--local_addr` keeps torchrun from looking up the host's name, which fails or hangs on machines
    without DNS. Which node is the host is said, since torchrun otherwise guesses from the names of this machine.
    """
    arguments = ["--rdzv_backend", "c10d", "--rdzv_id", "run"]
    if node is not None:
        is_host = f"is_host={int(node.index == 0)}"
        return [*arguments, "--rdzv_conf", is_host, "--local_addr", node.address, "--rdzv_endpoint", node.endpoint]
    if runner.type != "local":
        return arguments
    endpoint = _endpoint(runner.master_addr, runner.master_port or 0)
    return [*arguments, "--local_addr", runner.master_addr, "--rdzv_endpoint", endpoint]


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def environment(config: Config, *, cores: int, host: str | None = None) -> dict[str, str | None]:
    """Variables of the launched processes; None unsets one. `experiment.node_envs` win over `experiment.envs`.

    Args:
        cores: CPU cores that the ranks of one machine share.
        host: name of the machine, for `experiment.node_envs`.
    """
    runner = config.experiment.runner
    threads = config.system.threads_per_rank or max(1, cores // runner.nproc_per_node)
    # Unbuffered, so that logs/ shows what a rank did last when it hangs or is killed.
    variables: dict[str, str | None] = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if config.system.platform != "cpu":
        # Megatron-Core's tensor parallel overlap relies on kernels being issued in one order; without CUDA no effect.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if runner.type == "local" and runner.master_addr in ("127.0.0.1", "localhost"):
        # Gloo otherwise resolves the host's name, which fails in containers and on laptops that change networks.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    own = config.experiment.node_envs.get(host, {}) if host is not None else {}
    variables |= {str(name): _environment_text(value) for name, value in {**config.experiment.envs, **own}.items()}
    return variables


def _environment_text(value: Any) -> str | None:
    """A YAML value as a variable's text: true 1, false 0, null None (unset), lists and mappings JSON."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What a launch script does around its command."""

    variables: dict[str, str | None]
    """From `environment`."""
    workdir: Path
    """Folder the job runs in."""
    import_root: Path | None
    """Folder that holds the `flagscale` package; None when Python finds it by itself."""
    cmds: CmdsConfig
    setup: Sequence[str] = ()
    """Shell lines before the command, rendered by a runner."""


def launch_script(command: list[str], script: Script) -> str:
    """A bash script that starts the job and can be run by hand.

    It ends in `exec`, so that the process id of the script is torchrun's and signals reach torchrun. With
    `cmds.after_stop` the shell stays, passes SIGTERM and SIGINT on, and keeps the job's exit code.

    Args:
        command: what to start, from `torchrun_command`.
        script: what surrounds it.
    """
    lines = ["#!/usr/bin/env bash", "set -euo pipefail", f"cd {shlex.quote(str(script.workdir))}"]
    for name, value in script.variables.items():
        lines.append(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
    if script.import_root is not None:  # after the variables, of which PYTHONPATH may be one
        lines.append(f"export PYTHONPATH={shlex.quote(str(script.import_root))}${{PYTHONPATH:+:$PYTHONPATH}}")
    lines += script.setup
    if script.cmds.before_start:
        # User text often reads variables that may be unset, as environment modules do.
        lines += ["set +u", script.cmds.before_start.strip(), *_BEFORE]
    if not script.cmds.after_stop:
        return "\n".join([*lines, f"exec {quoted_lines(command)}"]) + "\n"
    lines += [f"{quoted_lines(command)} &", *_AFTER, script.cmds.after_stop.strip(), ") || echo after_stop failed >&2"]
    return "\n".join([*lines, 'exit "$code"']) + "\n"


_BEFORE = (
    "code=$?  # `set -e` looks over a failure left of &&",
    'if [ "$code" != 0 ]; then echo "before_start failed with exit code $code" >&2; exit "$code"; fi',
    "set -u",
)
_AFTER = (
    "job=$!",
    """trap 'kill -TERM "$job" 2>/dev/null || true' TERM INT""",
    "code=0",
    'wait "$job" || code=$?',
    """while kill -0 "$job" 2>/dev/null; do code=0; wait "$job" || code=$?; done  # a signal ends a wait early""",
    "trap - TERM INT",
    "(",
    "set +u",
)


def quoted_lines(command: list[str]) -> str:
    """The command over several lines, an option with its value on each."""
    lines: list[str] = []
    for argument in command:
        quoted = shlex.quote(argument)
        previous = lines[-1] if lines else ""
        if previous.startswith("-") and not set(" =") & set(previous) and not argument.startswith("-"):
            lines[-1] = f"{previous} {quoted}"
        else:
            lines.append(quoted)
    return " \\\n    ".join(lines)
