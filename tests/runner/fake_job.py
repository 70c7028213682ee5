"""Stand-in for torchrun and a trainer: a plain process that does, in a run's folder, what its arguments say.

fake_job.py EXP_DIR [--iterations N] [--step SECONDS] [--exit CODE] [--ignore-sigterm] [--grandchild]
                    [--user-error TEXT] [--fail-rank R] [--hang-after-failure]
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT_CAUSE = """
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : here
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 1)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


def main() -> int:
    arguments = _parse()
    exp_dir = Path(arguments.exp_dir)
    if arguments.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if arguments.grandchild:
        # Like a rank of torchrun: a session of its own, and deaf.
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    with (exp_dir / "metrics.jsonl").open("a") as metrics:
        for iteration in range(1, arguments.iterations + 1):
            time.sleep(arguments.step)
            values = {"iteration": iteration, "lm_loss": 1.0 / iteration, "iteration_time_s": arguments.step}
            metrics.write(json.dumps(values) + "\n")
            metrics.flush()
    if arguments.say:
        (exp_dir / "logs" / "console.log").write_text(arguments.say + "\n")
    if arguments.user_error:
        (exp_dir / "logs" / "user-error.json").write_text(json.dumps({"rank": 0, "message": arguments.user_error}))
        return 1
    if arguments.fail_rank is not None:
        _fail(exp_dir / "logs", arguments.fail_rank, arguments.hang_after_failure)
        return 1
    return arguments.exit


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("exp_dir")
    parser.add_argument("--iterations", type=int, default=0)
    parser.add_argument("--step", type=float, default=0.0)
    parser.add_argument("--exit", type=int, default=0)
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--grandchild", action="store_true")
    parser.add_argument("--say", default="")
    parser.add_argument("--user-error", default="")
    parser.add_argument("--fail-rank", type=int)
    parser.add_argument("--hang-after-failure", action="store_true")
    return parser.parse_args()


def _fail(logs: Path, rank: int, hang: bool) -> None:
    """Leave what torchrun and three ranks leave when `rank` raises and the others lose it."""
    for other in range(3):
        folder = logs / "run_x" / "attempt_0" / str(other)
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text("")
        reason = "ValueError: the loss is nan" if other == rank else "RuntimeError: Connection closed by peer"
        (folder / "stderr.log").write_text(f'Traceback (most recent call last):\n  File "t.py"\n{reason}\n')
    if hang:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
        print(f"Sending process {child.pid} closing signal SIGTERM", flush=True)
        child.wait()
    print(ROOT_CAUSE.format(rank=rank, code=1), flush=True)


if __name__ == "__main__":
    sys.exit(main())
