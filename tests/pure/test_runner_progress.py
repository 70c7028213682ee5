"""The terminal's view of a run: followed files, the progress line, and what a pipe gets."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.runner.progress import (
    Console,
    LineFollower,
    Progress,
    duration,
    parse_metrics,
    progress_line,
    validation_line,
)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def metrics(iteration: int, **more: float) -> str:
    return json.dumps({"iteration": iteration, "lm_loss": 2.0, "iteration_time_s": 0.5, **more}) + "\n"


@given(pieces=st.lists(st.binary(max_size=6).map(lambda b: b.replace(b"\r", b"").replace(b"\n\n", b"\n")), max_size=8))
def test_follower_gives_each_complete_line_once(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("follow") / "file"
    path.write_bytes(b"old line\nunfinished")
    follower = LineFollower(path)
    seen: list[str] = []
    for piece in pieces:
        with path.open("ab") as file:
            file.write(piece)
        seen += follower.poll()
    whole = b"".join(pieces)
    complete = whole[: whole.rfind(b"\n") + 1].decode(errors="replace")
    assert seen == complete.split("\n")[:-1]


def test_follower_waits_for_a_file(tmp_path: Path) -> None:
    follower = LineFollower(tmp_path / "later")
    assert follower.poll() == []
    (tmp_path / "later").write_text("first\n")
    assert follower.poll() == ["first"]


def test_follower_goes_on_after_a_file_was_cut_for_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("1\n2\n3\n")
    follower = LineFollower(path)
    path.write_text("1\n")
    assert follower.poll() == []
    path.write_text("1\n2\n")
    assert follower.poll() == ["2"]


def test_pipe_gets_plain_lines_not_too_many(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(stream, plain_interval_s=3600)
    (tmp_path / "logs").mkdir()
    progress = Progress(tmp_path, console, train_iters=50, log_interval=1)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for iteration in range(1, 51):
            file.write(metrics(iteration))
    (tmp_path / "logs" / "console.log").write_text("accuracy 95 %\n")
    progress.poll()
    lines = stream.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["iteration 1/50", "iteration 50/50", "accuracy 95 %"]
    assert "\r" not in stream.getvalue()


def test_terminal_overwrites_one_line_and_keeps_sentences(tmp_path: Path) -> None:
    stream = Terminal()
    console = Console(stream)
    console.status("iteration 1/9")
    console.line("a sentence")
    console.status("iteration 2/9")
    console.keep_status()
    shown = stream.getvalue().split("\r\x1b[2K")
    assert shown == ["", "iteration 1/9", "a sentence\niteration 1/9", "iteration 2/9\n"]


def test_pipe_gets_the_newest_status_at_the_end() -> None:
    stream = io.StringIO()
    console = Console(stream, plain_interval_s=3600)
    for text in ("one", "two", "three"):
        console.status(text)
    console.keep_status()
    console.keep_status()
    assert stream.getvalue() == "one\nthree\n"


def test_log_interval_thins_out_the_status(tmp_path: Path) -> None:
    stream = io.StringIO()
    progress = Progress(tmp_path, Console(stream, plain_interval_s=0), train_iters=11, log_interval=5)
    (tmp_path / "metrics.jsonl").write_text("".join(metrics(iteration) for iteration in range(1, 12)))
    progress.poll()
    assert [line.split(" | ")[0].split()[1] for line in stream.getvalue().splitlines()] == [
        "1/11",
        "5/11",
        "10/11",
        "11/11",
    ]


def test_validation_is_a_line_of_its_own(tmp_path: Path) -> None:
    stream = io.StringIO()
    progress = Progress(tmp_path, Console(stream), train_iters=2, log_interval=1)
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"iteration": 1, "eval_lm_loss": 1.25, "eval_accuracy": 0.5}) + "\n"
    )
    progress.poll()
    assert stream.getvalue() == "validation at iteration 1 | lm_loss 1.2500 | accuracy 0.5000\n"


def test_console_survives_a_reader_that_leaves() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    console = Console(Broken())
    console.line("one")
    console.line("two")


def test_progress_line_has_only_what_was_reported() -> None:
    values = {"iteration": 3, "lm_loss": 1.23456, "mtp_1_loss": 2.0, "grad_norm": 0.5, "iteration_time_s": 0.25}
    assert progress_line({**values, "samples_per_s": 128.0}, 10, 61) == (
        "iteration 3/10 | ETA 1:01 | loss 1.2346 | grad norm 0.500 | 0.25 s/step | 128.0 samples/s | mtp 2.0000"
    )
    assert progress_line({"iteration": 3, "mtp_1_loss": None}, 10, None) == "iteration 3/10"


def test_validation_line_keeps_whole_numbers() -> None:
    assert validation_line({"iteration": 3, "eval_samples": 12}) == "validation at iteration 3 | samples 12"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01"), (-3, "0:00")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("line", ["", "{", "[]", '{"lm_loss": 1}', "nan"])
def test_damaged_metrics_are_passed_over(line: str) -> None:
    assert parse_metrics(line) is None
