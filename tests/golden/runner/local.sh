#!/usr/bin/env bash
set -euo pipefail
cd '/work/my project'
export OMP_NUM_THREADS=2
export PYTHONUNBUFFERED=1
export CUDA_DEVICE_MAX_CONNECTIONS=1
export GLOO_SOCKET_IFNAME=lo
export PYTHONPATH=/code${PYTHONPATH:+:$PYTHONPATH}
exec /venv/bin/python \
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
    --plan '/runs/it'"'"'s a $run/plan.json'
