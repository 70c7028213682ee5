"""A trainer without a model: reads the plan, reports iterations, and may fail or hang on rank 1.

Environment: TINY_MODE is unset, `raise`, or `hang` (deaf to SIGTERM), `wait`, `wait_if_4` (in a world of 4), or
`wait_once` (in a Slurm job that was not requeued); WHERE is printed.
`raise_once` raises on rank 1 at the first start. Each rank writes its process id to exp_dir/rank<r>.pid.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

rank = int(os.environ["RANK"])
plan_path = Path(sys.argv[sys.argv.index("--plan") + 1])
plan = json.loads(plan_path.read_text())
mode = os.environ.get("TINY_MODE", "")
if mode == "wait_if_4":
    mode = "wait" if os.environ["WORLD_SIZE"] == "4" else ""
if mode == "wait_once":
    mode = "" if "SLURM_RESTART_COUNT" in os.environ else "wait"

# Not by TORCHELASTIC_RESTART_COUNT, which a host counts for itself. All ranks of a start agree, since they look before
# they write their process ids, and rank 1 waits for all ids before it sets the mark.
raised = plan_path.parent / "raised"
if mode == "raise_once":
    mode = "" if raised.exists() else "raise"

if mode == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(plan_path.parent / f"rank{rank}.pid").write_text(str(os.getpid()))
if "WHERE" in os.environ:
    print(f"WHERE {os.environ['WHERE']}", flush=True)
if rank == 0:
    with (plan_path.parent / "metrics.jsonl").open("a") as metrics:
        for iteration in range(1, plan["config"]["model"]["train_iters"] + 1):
            metrics.write(json.dumps({"iteration": iteration, "lm_loss": 1.0, "iteration_time_s": 0.01}) + "\n")
if mode == "raise" and rank == 1:
    ids = [plan_path.parent / f"rank{other}.pid" for other in range(int(os.environ["WORLD_SIZE"]))]
    while not all(path.exists() for path in ids):
        time.sleep(0.05)
    raised.touch()
    raise ValueError("the loss is nan")
if mode in ("raise", "hang", "wait"):
    time.sleep(300)
print(f"rank {rank} of {os.environ['WORLD_SIZE']} is done")
