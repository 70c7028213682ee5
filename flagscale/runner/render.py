"""A configuration -> the text that starts it: the torchrun command, the environment, the launch script.

Pure functions: nothing is read from the machine and nothing is written, so that `action=dryrun` shows exactly what
a run would start. Everything that reaches a shell goes through `shlex.quote`.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from flagscale.config.errors import UserError
from flagscale.config.schema import Config, RunnerConfig

ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def torchrun_command(config: Config, exp_dir: Path, *, python: str = sys.executable) -> list[str]:
    """The argument list that starts all ranks of this machine.

    Args:
        config: the whole configuration; its entrypoint may be relative to the working folder of the launch.
        exp_dir: the run's folder, absolute; it receives each rank's output under `logs/`.
        python: interpreter of the ranks.
    """
    runner = config.experiment.runner
    return [
        python,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(runner.nnodes),
        "--nproc_per_node",
        str(runner.nproc_per_node),
        *_rendezvous(runner),
        "--log-dir",
        str(exp_dir / "logs"),
        "--redirects",
        "3",
        config.experiment.task.entrypoint,
        "--plan",
        str(exp_dir / "plan.json"),
    ]


def _rendezvous(runner: RunnerConfig) -> list[str]:
    """How the ranks find each other.

    Port 0 lets the operating system choose while it binds, which cannot lose a race as a port probed beforehand can.
    `--local_addr` keeps torchrun from looking up the host's name, which fails or hangs on machines without DNS.
    """
    arguments = ["--rdzv_backend", "c10d", "--rdzv_id", "run"]
    if runner.nnodes == 1:
        arguments += ["--local_addr", runner.master_addr]
    return [*arguments, "--rdzv_endpoint", f"{runner.master_addr}:{runner.master_port or 0}"]


def environment(config: Config, *, cores: int) -> dict[str, str | None]:
    """Variables of the launched processes; None unsets one. The user's `experiment.envs` have the last word.

    Args:
        cores: CPU cores that the ranks of one machine share.

    Raises:
        UserError: for a name that no shell accepts.
    """
    runner = config.experiment.runner
    threads = config.system.threads_per_rank or max(1, cores // runner.nproc_per_node)
    # Unbuffered, so that logs/ shows what a rank did last when it hangs or is killed.
    variables: dict[str, str | None] = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if config.system.platform != "cpu":
        # Megatron-Core's tensor parallel overlap relies on kernels being issued in one order; without CUDA no effect.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if runner.nnodes == 1 and runner.master_addr in ("127.0.0.1", "localhost"):
        # Gloo otherwise resolves the host's name, which fails in containers and on laptops that change networks.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    for name, value in config.experiment.envs.items():
        if not ENVIRONMENT_NAME.fullmatch(str(name)):
            raise UserError(
                f"experiment.envs.{name}: not a name for an environment variable; "
                "use letters, digits and _ and no digit first"
            )
        variables[str(name)] = _environment_text(value)
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


def shell_line(command: list[str]) -> str:
    """A command as one line that a shell understands as the same arguments."""
    return shlex.join(command)


def launch_script(command: list[str], variables: dict[str, str | None], *, workdir: Path, import_root: Path) -> str:
    """A bash script that starts the job and can be run by hand.

    It ends in `exec`, so that the process id of the script is torchrun's and signals reach torchrun.

    Args:
        command: what to start, from `torchrun_command`.
        variables: from `environment`.
        workdir: folder the job runs in.
        import_root: folder that holds the `flagscale` package, for checkouts that are not installed.
    """
    lines = ["#!/usr/bin/env bash", "set -euo pipefail", f"cd {shlex.quote(str(workdir))}"]
    lines.append(f"export PYTHONPATH={shlex.quote(str(import_root))}${{PYTHONPATH:+:$PYTHONPATH}}")
    for name, value in variables.items():
        lines.append(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
    return "\n".join([*lines, f"exec {_wrapped(command)}"]) + "\n"


def _wrapped(command: list[str]) -> str:
    """The command over several lines, an option with its value on each."""
    lines: list[str] = []
    for argument in command:
        quoted = shlex.quote(argument)
        previous = lines[-1] if lines else ""
        if previous.startswith("-") and " " not in previous and not argument.startswith("-"):
            lines[-1] = f"{previous} {quoted}"
        else:
            lines.append(quoted)
    return " \\\n    ".join(lines)
