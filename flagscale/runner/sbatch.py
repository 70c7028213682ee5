"""A configuration -> the text of a Slurm job: the batch script, and what each node's launch script sets up.

Pure functions, as in `render`. The batch script runs once, on the first node, and starts `launch.sh` on every node
with srun; both can be used by hand.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from flagscale.config.schema import Config
from flagscale.plan.leave import LEAVE_REQUEST, LEFT
from flagscale.runner.render import quoted_lines

LOG = "slurm.log"
UNFINISHED = 75
"""Exit code of a job that left before its end and is not requeued; EX_TEMPFAIL of sysexits.h."""
_FIRST_PORT, _PORTS = 20000, 10000

_WAIT = (
    "step=$!",
    "code=0",
    'wait "$step" || code=$?',
    """while kill -0 "$step" 2>/dev/null; do code=0; wait "$step" || code=$?; done  # a signal ends a wait early""",
)


def batch_script(config: Config, exp_dir: Path) -> str:
    """The script for sbatch.

    Before the time limit Slurm signals the script, which leaves a request for the trainer; when the trainer has saved
    and left, the job goes back to the queue and resumes where it was.
    """
    slurm = config.experiment.runner.slurm
    launch = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpu-bind=none"]
    if slurm.cpus_per_task:
        launch.append(f"--cpus-per-task={slurm.cpus_per_task}")  # srun does not take it over from sbatch
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {_directive(option)}" for option in _options(config, exp_dir)),
        "set -euo pipefail",
        f"exp_dir={shlex.quote(str(exp_dir))}",
        f'request="$exp_dir"/{LEAVE_REQUEST} left="$exp_dir"/{LEFT}',
        'rm -f "$request" "$left"',
        """trap 'touch "$request"' USR1""",
        'echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, requeued ${SLURM_RESTART_COUNT:-0} times"',
        f"{quoted_lines([*launch, 'bash', str(exp_dir / 'launch.sh')])} &",
        *_WAIT,
        'rm -f "$request"',
    ]
    return "\n".join([*lines, *_after_leaving(slurm.requeue), 'exit "$code"']) + "\n"


def _after_leaving(requeue: bool) -> list[str]:
    """What happens to a run that has saved and left before its end."""
    then = [
        'echo "job $SLURM_JOB_ID has saved and goes back to the queue"',
        'scontrol requeue "$SLURM_JOB_ID"',
        "sleep 60  # Slurm ends this script",
    ]
    if not requeue:
        then = ['echo "the time is up; submit again to resume from the checkpoint"', f"exit {UNFINISHED}"]
    return ['if [ -e "$left" ]; then', *(f"    {line}" for line in ['rm "$left"', *then]), "fi"]


def node_setup(config: Config, exp_dir: Path) -> list[str]:
    """Lines of `launch.sh` that tell torchrun, in its `PET_` variables, what differs between nodes and starts."""
    port = config.experiment.runner.master_port
    return [
        'address_of() { scontrol show node --oneliner "$1" | sed -n "s/.* NodeAddr=\\([^ ]*\\).*/\\1/p"; }',
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"port={port}" if port else f"port=$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))",
        'PET_RDZV_ENDPOINT="$(address_of "$head"):$port"',
        'PET_LOCAL_ADDR="$(address_of "$SLURMD_NODENAME")"',
        "PET_RDZV_CONF=is_host=$((SLURM_NODEID == 0))",
        f'PET_LOG_DIR={shlex.quote(str(exp_dir / "nodes"))}/"$SLURMD_NODENAME"/logs',
        "export PET_RDZV_ENDPOINT PET_LOCAL_ADDR PET_RDZV_CONF PET_LOG_DIR",
        'mkdir -p "$PET_LOG_DIR"',
    ]


def _options(config: Config, exp_dir: Path) -> list[str]:
    runner, slurm = config.experiment.runner, config.experiment.runner.slurm
    wanted = {
        "job-name": config.experiment.exp_name,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "nodes": runner.nnodes,
        "ntasks-per-node": 1,
        "cpus-per-task": slurm.cpus_per_task,
        "gpus-per-node": slurm.gpus_per_node,
        "time": slurm.time_limit,
        "output": str(exp_dir / "logs" / LOG).replace("%", "%%"),  # % starts one of sbatch's patterns
        "open-mode": "append",
        "signal": f"B:USR1@{slurm.signal_before}",
    }
    options = [f"--{name}={value}" for name, value in wanted.items() if value is not None]
    return [*options, "--requeue" if slurm.requeue else "--no-requeue", *slurm.options]


def _directive(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if equals else name
