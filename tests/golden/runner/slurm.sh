#!/usr/bin/env bash
set -euo pipefail
cd '/work/my project'
export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1
export CUDA_DEVICE_MAX_CONNECTIONS=1
export TOKEN='a b'
export PYTHONPATH=/code${PYTHONPATH:+:$PYTHONPATH}
address_of() { scontrol show node --oneliner "$1" | sed -n "s/.* NodeAddr=\([^ ]*\).*/\1/p"; }
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
PET_RDZV_ENDPOINT="$(address_of "$head"):$port"
PET_LOCAL_ADDR="$(address_of "$SLURMD_NODENAME")"
PET_RDZV_CONF=is_host=$((SLURM_NODEID == 0))
PET_LOG_DIR='/runs/it'"'"'s a 100% $run/nodes'/"$SLURMD_NODENAME"/logs
export PET_RDZV_ENDPOINT PET_LOCAL_ADDR PET_RDZV_CONF PET_LOG_DIR
mkdir -p "$PET_LOG_DIR"
exec /venv/bin/python \
    -m torch.distributed.run \
    --nnodes 2 \
    --nproc_per_node 8 \
    --rdzv_backend c10d \
    --rdzv_id run \
    --max-restarts 1 \
    --redirects 3 \
    '/code/train me.py' \
    --plan '/runs/it'"'"'s a 100% $run/plan.json'
