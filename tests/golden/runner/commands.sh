#!/usr/bin/env bash
set -euo pipefail
cd '/work/my project'
export OMP_NUM_THREADS=2
export PYTHONUNBUFFERED=1
export CUDA_DEVICE_MAX_CONNECTIONS=1
export GLOO_SOCKET_IFNAME=lo
export PYTHONPATH=/code${PYTHONPATH:+:$PYTHONPATH}
set +u
module load cuda && ulimit -n 65536
code=$?  # `set -e` looks over a failure left of &&
if [ "$code" != 0 ]; then echo "before_start failed with exit code $code" >&2; exit "$code"; fi
set -u
/venv/bin/python \
    -m torch.distributed.run \
    --nnodes 1 \
    --nproc_per_node 4 \
    --rdzv_backend c10d \
    --rdzv_id run \
    --local_addr 127.0.0.1 \
    --rdzv_endpoint 127.0.0.1:0 \
    --log-dir '/runs/it'"'"'s a $run/logs' \
    --redirects 3 \
    '/code/train me.py' \
    --plan '/runs/it'"'"'s a $run/plan.json' &
job=$!
trap 'kill -TERM "$job" 2>/dev/null || true' TERM INT
code=0
wait "$job" || code=$?
while kill -0 "$job" 2>/dev/null; do code=0; wait "$job" || code=$?; done  # a signal ends a wait early
trap - TERM INT
(
set +u
rm -rf "/scratch/$USER"
) || echo after_stop failed >&2
exit "$code"
