#!/usr/bin/env bash
# The 8-GPU recipe over ssh, on two hosts with four GPUs each; the checkout and exp_dir are on a shared file system:
#     bash examples/qwen35_mimo/ssh.sh HOSTFILE [key=value ...]
# A hostfile has one host a line, `[user@]host[:port] [slots=N]`; hosts.example is one.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: $0 HOSTFILE [key=value ...]" >&2; exit 2; }
hostfile="$(realpath "$1")"
shift
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-.venv/bin/python}"

usual=(
    experiment.runner.type=ssh
    experiment.runner.hostfile="'$hostfile'"
    experiment.runner.nnodes=2
    experiment.runner.nproc_per_node=4
)
for key_value in "${usual[@]}"; do  # the command line's own key=value wins
    case " $* " in *" ${key_value%%=*}="*) ;; *) set -- "$key_value" "$@" ;; esac
done
exec "$PYTHON" run.py --config-path examples/qwen35_mimo/conf --config-name 4b_h200x8 "$@"
