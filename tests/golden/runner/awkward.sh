#!/usr/bin/env bash
set -euo pipefail
cd '/work/my project'
export OMP_NUM_THREADS=4
export PYTHONUNBUFFERED=1
export CUDA_DEVICE_MAX_CONNECTIONS=1
export GLOO_SOCKET_IFNAME=lo
export PLAIN=x
export SPACES='two words'
export QUOTES='it'"'"'s "so" '
export DOLLAR='$HOME `id` $(id) !!'
export JSON='{"a": [1, true, null], "ü": "ß"}'
export UNICODE='数据 ✓'
export LINES='one
two'
export NUMBER=3
export FRACTION=0.5
export YES=1
export NO=0
unset GONE
export EMPTY=''
export PYTHONPATH=/code${PYTHONPATH:+:$PYTHONPATH}
exec /venv/bin/python \
    -m torch.distributed.run \
    --nnodes 1 \
    --nproc_per_node 2 \
    --rdzv_backend c10d \
    --rdzv_id run \
    --local_addr 127.0.0.1 \
    --rdzv_endpoint 127.0.0.1:29500 \
    --log-dir '/runs/it'"'"'s a $run/logs' \
    --redirects 3 \
    '/code/train me.py' \
    --plan '/runs/it'"'"'s a $run/plan.json'
