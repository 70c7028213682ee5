#!/usr/bin/env bash
set -euo pipefail
cd '/work/my project'
export OMP_NUM_THREADS=2
export PYTHONUNBUFFERED=1
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NUMBER=4
export ONLY_HERE='x y'
export PYTHONPATH=/code${PYTHONPATH:+:$PYTHONPATH}
exec /venv/bin/python \
    -m torch.distributed.run \
    --nnodes 2 \
    --nproc_per_node 4 \
    --rdzv_backend c10d \
    --rdzv_id run \
    --rdzv_conf is_host=0 \
    --local_addr fd00::2 \
    --rdzv_endpoint '[fd00::1]:29500' \
    --max-restarts 3 \
    --log-dir '/runs/it'"'"'s a $run/nodes/1/logs' \
    --redirects 3 \
    '/code/train me.py' \
    --plan '/runs/it'"'"'s a $run/plan.json'
