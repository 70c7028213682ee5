"""Of many ranks that failed, the one that is the cause is found and shown."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flagscale.runner.failure import (
    first_failure,
    last_traceback,
    link_rank_logs,
    rank_folders,
    ranks_told_to_end,
    user_error,
)

OWN = 'Traceback (most recent call last):\n  File "train.py", line 1\nValueError: the loss is nan\n'
PEER = 'Traceback (most recent call last):\n  File "train.py", line 1\nRuntimeError: Connection closed by peer [::1]\n'
ROOT = """
E1130 api.py:1002] failed (exitcode: {code}) local_rank: {rank} (pid: 8870) of binary: python
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 8869)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_12:28:15
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 8870)
  error_file: <N/A>
"""


def logs(folder: Path, stderr: dict[int, str], torchrun: str = "", start: str = "run_a", attempt: int = 0) -> Path:
    """A log folder as torchrun leaves it."""
    for rank, text in stderr.items():
        path = folder / start / f"attempt_{attempt}" / str(rank)
        path.mkdir(parents=True)
        (path / "stderr.log").write_text(text)
        (path / "stdout.log").write_text("")
    (folder / "torchrun.log").write_text(torchrun)
    return folder


def recorded(folder: Path, rank: int, timestamp: int) -> None:
    """The error file of a rank whose entrypoint torchrun records."""
    message = {"message": "ValueError", "extraInfo": {"py_callstack": "", "timestamp": str(timestamp)}}
    (folder / "run_a" / "attempt_0" / str(rank) / "error.json").write_text(json.dumps({"message": message}))


def test_torchruns_root_cause_names_the_rank(tmp_path: Path) -> None:
    failure = first_failure(logs(tmp_path, {0: OWN, 1: OWN}, ROOT.format(rank=1, code=1)), since=0)
    assert (failure.rank, failure.traceback, failure.cause) == (1, OWN.rstrip(), "")
    assert failure.log == tmp_path / "run_a" / "attempt_0" / "1" / "stderr.log"


def test_earliest_error_file_beats_the_first_exit(tmp_path: Path) -> None:
    folder = logs(tmp_path, {0: OWN, 1: OWN}, ROOT.format(rank=0, code=1))
    recorded(folder, 0, 200)
    recorded(folder, 1, 100)
    assert first_failure(folder, since=0).rank == 1


def test_lost_peer_is_not_the_cause(tmp_path: Path) -> None:
    folder = logs(tmp_path, {0: PEER, 1: PEER, 2: OWN}, ROOT.format(rank=0, code=1))
    failure = first_failure(folder, since=0)
    assert (failure.rank, "nan" in failure.traceback) == (2, True)


def test_all_lost_their_peer(tmp_path: Path) -> None:
    assert first_failure(logs(tmp_path, {0: PEER, 1: PEER}, ROOT.format(rank=1, code=1)), since=0).rank == 1


def test_rank_that_a_signal_ended(tmp_path: Path) -> None:
    failure = first_failure(logs(tmp_path, {0: "", 1: "last words\n"}, ROOT.format(rank=1, code=-9)), since=0)
    assert failure.report().splitlines() == [
        "rank 1 failed: ended by signal 9 (SIGKILL, often the kernel when memory runs out)",
        "last words",
        f"log of rank 1: {failure.log}",
    ]


EXITS = """
Failures:
[1]:
  rank      : 2 (local_rank: 2)
  exitcode  : -15 (pid: 8869)  (SIGTERM)
[2]:
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 8871)
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 8870)
"""


def told(folder: Path, rank: int, name: str, **tree: object) -> None:
    """A file that a rank leaves beside its log."""
    (folder / "run_a" / "attempt_0" / str(rank) / name).write_text(json.dumps(tree) + "   ")


def test_an_explanation_stands_for_the_traceback(tmp_path: Path) -> None:
    """And the earliest of those with a cause of their own counts, whoever was seen to exit first."""
    folder = logs(tmp_path, {0: PEER, 1: OWN, 2: OWN}, ROOT.format(rank=0, code=1))
    told(folder, 0, "ending.json", kind="peer", message="lost another rank in iteration 3", time=1.0)
    told(folder, 1, "ending.json", kind="memory", message="ran out of memory in iteration 3, phase language", time=3.0)
    told(folder, 2, "ending.json", kind="memory", message="ran out of memory in iteration 3, phase exchange", time=2.0)
    failure = first_failure(folder, since=0)
    assert failure.report().splitlines() == [
        "rank 2 ran out of memory in iteration 3, phase exchange",
        f"log of rank 2: {failure.log}",
    ]


def test_what_no_rank_can_do_anything_about_names_the_ranks_itself(tmp_path: Path) -> None:
    folder = logs(tmp_path, {0: OWN, 1: OWN}, ROOT.format(rank=1, code=1))
    for rank in range(2):
        told(folder, rank, "ending.json", kind="not finite", message="the last 10 steps: rank 1", time=float(rank))
    assert first_failure(folder, since=0).report().splitlines()[0] == "the last 10 steps: rank 1"


def test_a_killed_rank_beats_those_that_lost_it(tmp_path: Path) -> None:
    """Its place says where; the peer's own ending does not count."""
    folder = logs(tmp_path, {0: PEER, 1: "warning\n", 2: ""}, EXITS.format(code=-9))
    told(folder, 0, "ending.json", kind="peer", message="lost another rank in iteration 3", time=1.0)
    for rank in range(3):
        told(folder, rank, "place.json", where="in iteration 3, phase language", memory="lower x", peer="set y")
    failure = first_failure(folder, since=0)
    assert failure.report().splitlines() == [
        "rank 1 was ended by signal 9 (SIGKILL, often the kernel when memory runs out) in iteration 3, phase language; "
        "if so: lower x; set y",
        f"log of rank 1: {failure.log}",
    ]


def test_a_rank_that_nccl_ended(tmp_path: Path) -> None:
    text = "[rank1]:[E1130 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: ALLREDUCE\n"
    folder = logs(tmp_path, {0: "", 1: text}, ROOT.format(rank=1, code=-6))
    told(folder, 1, "place.json", where="in iteration 3, phase reduce", memory="lower x", peer="set y")
    assert first_failure(folder, since=0).report().splitlines()[0] == (
        "rank 1 waited in vain for another rank in iteration 3, phase reduce (NCCL gave up); set y"
    )


def test_all_say_they_lost_a_peer(tmp_path: Path) -> None:
    folder = logs(tmp_path, {0: PEER, 1: PEER}, ROOT.format(rank=1, code=1))
    for rank in range(2):
        told(folder, rank, "ending.json", kind="peer", message="lost another rank in iteration 3", time=1.0)
    assert first_failure(folder, since=0).report().splitlines()[0] == "rank 1 lost another rank in iteration 3"


def test_torchrun_itself_failed(tmp_path: Path) -> None:
    failure = first_failure(logs(tmp_path, {}, "usage: run.py\nerror: no such option\n"), since=0)
    assert failure.rank is None
    assert failure.report() == (
        f"the job failed\nusage: run.py\nerror: no such option\nlog of the job: {tmp_path / 'torchrun.log'}"
    )


def test_newest_start_counts_and_older_ones_do_not(tmp_path: Path) -> None:
    logs(tmp_path, {0: OWN}, start="run_b")
    os.utime(tmp_path / "run_b" / "attempt_0", (100, 100))
    assert rank_folders(tmp_path, since=0).keys() == {0}
    assert rank_folders(tmp_path, since=200) == {}
    logs(tmp_path, {0: OWN, 1: OWN}, start="run_b", attempt=1)
    assert rank_folders(tmp_path, since=0)[1] == tmp_path / "run_b" / "attempt_1" / "1"


def test_links_follow_the_newest_start(tmp_path: Path) -> None:
    logs(tmp_path, {0: "first"})
    os.utime(tmp_path / "run_a" / "attempt_0", (100, 100))
    link_rank_logs(tmp_path, since=0)
    assert (tmp_path / "rank0.err").read_text() == "first"
    logs(tmp_path, {0: "second"}, start="run_b")
    link_rank_logs(tmp_path, since=0)
    link_rank_logs(tmp_path, since=0)
    assert (tmp_path / "rank0.err").read_text() == "second"
    assert first_failure(logs(tmp_path, {}, ROOT.format(rank=0, code=1)), since=0).log == tmp_path / "rank0.err"


def test_traceback_with_its_history_and_without_torchs_prefix() -> None:
    chained = OWN + "\nDuring handling of the above exception, another exception occurred:\n\n" + OWN
    text = "noise\n" + PEER + "later noise\n" + "".join(f"[rank3]: {line}\n" for line in chained.splitlines())
    assert last_traceback(text) == chained.rstrip()


def test_long_traceback_keeps_both_ends() -> None:
    text = "Traceback (most recent call last):\n" + "\n".join(f"  line {number}" for number in range(500)) + "\nEnd: x"
    shown = last_traceback(text).splitlines()
    assert (shown[0], shown[-1], len(shown)) == ("Traceback (most recent call last):", "End: x", 61)
    assert "  ... 442 lines left out ..." in shown


@pytest.mark.parametrize(
    ("text", "message"), [('{"rank": 1, "message": "x must be 2"}', "x must be 2"), ("{", None), ("[]", None)]
)
def test_users_mistake(tmp_path: Path, text: str, message: str | None) -> None:
    assert user_error(tmp_path) is None
    (tmp_path / "user-error.json").write_text(text)
    assert user_error(tmp_path) == message


def test_torchruns_words_for_ending_the_others(tmp_path: Path) -> None:
    assert ranks_told_to_end(tmp_path) == []
    (tmp_path / "torchrun.log").write_text(
        "W1130 master address is only used for static rdzv_backend\n"
        "W1130 8864 api.py:1028] Sending process 8869 closing signal SIGTERM\n"
        "W1130 8864 api.py:1028] Sending process 8870 closing signal SIGTERM\n"
    )
    assert ranks_told_to_end(tmp_path) == [8869, 8870]
