#!/usr/bin/env bash
# Submits the 8-GPU recipe to Slurm and follows it: one node with eight GPUs. From a login node, in the checkout:
#     bash examples/qwen35_mimo/slurm.sh [key=value ...]
# Ctrl-C stops looking and leaves the job; the same command with action=query or action=stop attends to it.
# Before the time limit the job saves a checkpoint, goes back to the queue, and resumes.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-.venv/bin/python}"

usual=(
    experiment.runner.type=slurm
    experiment.runner.slurm.gpus_per_node=8
    experiment.runner.slurm.cpus_per_task=64
    experiment.runner.slurm.time_limit=240
    experiment.runner.slurm.signal_before=300
    experiment.runner.max_restarts=1
)
for key_value in "${usual[@]}"; do  # the command line's own key=value wins
    case " $* " in *" ${key_value%%=*}="*) ;; *) set -- "$key_value" "$@" ;; esac
done
exec "$PYTHON" run.py --config-path examples/qwen35_mimo/conf --config-name 4b_h200x8 "$@"
