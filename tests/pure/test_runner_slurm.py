"""What `scontrol show job` says, as the launcher understands it."""

from __future__ import annotations

import pytest

from flagscale.config.errors import UserError
from flagscale.runner.slurm import parse_job, submitted_id

LINE = (
    "JobId=7 JobName=a run UserId=me(1) JobState={state} Reason={reason} Requeue=1 ExitCode={code} RunTime=00:01:02 "
    "TimeLimit=01:00:00 NodeList={nodes} BatchHost=n1"
)


@pytest.mark.parametrize(
    ("state", "reason", "code", "nodes", "active", "exit_code", "shown"),
    [
        ("PENDING", "Resources", "0:0", "(null)", True, 0, "PENDING (Resources)"),
        ("RUNNING", "None", "0:0", "n[1-2]", True, 0, "RUNNING on n[1-2], elapsed 00:01:02 of 01:00:00"),
        ("COMPLETING", "None", "0:0", "n1", True, 0, "COMPLETING on n1, elapsed 00:01:02 of 01:00:00"),
        ("REQUEUED", "BeginTime", "0:0", "n1", True, 0, "REQUEUED (BeginTime)"),
        ("COMPLETED", "None", "0:0", "n1", False, 0, "COMPLETED on n1, elapsed 00:01:02 of 01:00:00"),
        ("FAILED", "NonZeroExitCode", "3:0", "n1", False, 3, "FAILED on n1, elapsed 00:01:02 of 01:00:00"),
        ("FAILED", "RaisedSignal:9", "0:9", "n1", False, 137, "FAILED on n1, elapsed 00:01:02 of 01:00:00"),
        ("CANCELLED", "None", "0:15", "n1", False, 143, "CANCELLED on n1, elapsed 00:01:02 of 01:00:00"),
        ("TIMEOUT", "TimeLimit", "0:0", "n1", False, 0, "TIMEOUT on n1, elapsed 00:01:02 of 01:00:00"),
    ],
)
def test_states(state: str, reason: str, code: str, nodes: str, active: bool, exit_code: int, shown: str) -> None:
    found = parse_job(LINE.format(state=state, reason=reason, code=code, nodes=nodes))
    assert (found.is_active, found.exit_code, str(found)) == (active, exit_code, shown)


def test_number_of_a_submitted_job() -> None:
    assert [submitted_id(text) for text in ("12\n", "12;south\n", "Welcome!\n\n12\n")] == [12, 12, 12]
    for text in ("", "Submitted batch job 12\n"):
        with pytest.raises(UserError, match="names no job"):
            submitted_id(text)
