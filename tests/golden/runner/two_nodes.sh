#!/usr/bin/env bash
set -euo pipefail
cd '/work/my project'
export PYTHONPATH=/code${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=2
export PYTHONUNBUFFERED=1
export CUDA_DEVICE_MAX_CONNECTIONS=1
exec /venv/bin/python \
    -m torch.distributed.run \
    --nnodes 2 \
    --nproc_per_node 4 \
    --rdzv_backend c10d \
    --rdzv_id run \
    --rdzv_endpoint node-0:29500 \
    --log-dir '/runs/it'"'"'s a $run/logs' \
    --redirects 3 \
    '/code/train me.py' \
    --plan '/runs/it'"'"'s a $run/plan.json'
