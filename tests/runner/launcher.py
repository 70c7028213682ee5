"""A launcher process for tests: runs a `LocalJob` with the given command, as `run.py` would.

launcher.py EXP_DIR foreground|detached STOP_GRACE -- COMMAND...
"""

from __future__ import annotations

import sys
from pathlib import Path

from flagscale.config.errors import UserError
from flagscale.runner.background import run_detached
from flagscale.runner.local import LocalJob, run_foreground
from flagscale.runner.progress import Console
from flagscale.runner.record import claim


def main() -> int:
    exp_dir, mode, grace = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    command = sys.argv[sys.argv.index("--") + 1 :]
    job = LocalJob(exp_dir=exp_dir, home=exp_dir, command=command, train_iters=5, log_interval=1, stop_grace=grace)
    try:
        with claim(exp_dir):
            if mode == "foreground":
                return run_foreground(job, Console(sys.stdout))
            return run_detached(
                exp_dir, lambda console, started: run_foreground(job, console, on_started=started), Console(sys.stdout)
            )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
