"""What the terminal shows of a running job, read from the files the job writes.

`metrics.jsonl` has a line an iteration and becomes the progress line; `logs/console.log` holds sentences of rank 0
and is shown as it is. Reading files rather than pipes works the same for a job in the background, on another
machine, or in a Slurm allocation.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

PLAIN_INTERVAL_S = 5.0
_RECENT = 20
_CLEAR_LINE = "\r\x1b[2K"


class LineFollower:
    """The complete lines that are appended to a file from now on, or its lines `from_start`; it need not exist yet."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() and not from_start else 0

    def poll(self) -> list[str]:
        """New lines since the last call. A file that became shorter was rewritten: what it holds by then is old."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return []
        if size < self._position:
            self._position = size
        if size == self._position:
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]  # the rest of a line that is being written comes next time
        self._position += len(complete)
        return complete.decode(errors="replace").split("\n")[:-1]


class Console:
    """A terminal, or a pipe: lasting lines, and one status line that a terminal overwrites in place.

    A pipe gets the status as plain lines, at most one every `PLAIN_INTERVAL_S` seconds. Output that no one reads any
    more (`| head`) is dropped and the job goes on.
    """

    def __init__(self, stream: TextIO, *, plain_interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._stream: TextIO | None = stream
        self._is_terminal = stream.isatty()
        self._plain_interval_s = plain_interval_s
        self._last_plain = float("-inf")
        self._shown = ""
        self._held_back = ""

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._shown:
            self._write(f"{_CLEAR_LINE}{text}\n{self._shown}")
        else:
            self._write(text + "\n")

    def status(self, text: str, *, important: bool = False) -> None:
        """The current state; `important` is printed on a pipe however short ago the last one was."""
        if self._is_terminal:
            self._shown = text[: shutil.get_terminal_size().columns - 1]
            self._write(_CLEAR_LINE + self._shown)
        elif important or time.monotonic() - self._last_plain >= self._plain_interval_s:
            self._last_plain, self._held_back = time.monotonic(), ""
            self._write(text + "\n")
        else:
            self._held_back = text

    def keep_status(self) -> None:
        """Turn the newest status into a line that stays."""
        if self._shown:
            self._shown = ""
            self._write("\n")
        elif self._held_back:
            self._write(self._held_back + "\n")
            self._held_back = ""

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # the reader has gone
            self._stream = None


class Progress:
    """Turns the files of a run into lines on a console."""

    def __init__(self, exp_dir: Path, console: Console, *, train_iters: int, log_interval: int) -> None:
        self._metrics = LineFollower(exp_dir / "metrics.jsonl")
        self._sentences = LineFollower(exp_dir / "logs" / "console.log")
        self._console = console
        self._train_iters = train_iters
        self._log_interval = log_interval
        self._times: deque[float] = deque(maxlen=_RECENT)
        self._is_first = True

    def poll(self) -> None:
        """Show what is new."""
        for line in self._metrics.poll():
            values = parse_metrics(line)
            if values is not None:
                self._show(values)
        for line in self._sentences.poll():
            self._console.line(line)

    def _show(self, values: Mapping[str, Any]) -> None:
        if any(name.startswith("eval_") for name in values):
            self._console.line(validation_line(values))
        if "iteration_time_s" not in values:
            return
        self._times.append(float(values["iteration_time_s"]))
        iteration = int(values["iteration"])
        is_last = iteration == self._train_iters
        if iteration % self._log_interval == 0 or is_last or self._is_first:
            seconds_left = (self._train_iters - iteration) * sum(self._times) / len(self._times)
            text = progress_line(values, self._train_iters, seconds_left)
            self._console.status(text, important=is_last or self._is_first)
            self._is_first = False
        if is_last:
            self._console.keep_status()


def parse_metrics(line: str) -> dict[str, Any] | None:
    """One line of metrics.jsonl; None for a line that is no JSON object with an iteration (cut off by a crash)."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and "iteration" in values else None


def progress_line(values: Mapping[str, Any], train_iters: int, seconds_left: float | None) -> str:
    """The line of one iteration: what the trainer reported, what matters most first, since terminals may be narrow."""
    parts = [f"iteration {values['iteration']}/{train_iters}"]
    if seconds_left is not None:
        parts.append(f"ETA {duration(seconds_left)}")
    parts += [
        form.format(float(values[name]))
        for name, form in (
            ("lm_loss", "loss {:.4f}"),
            ("grad_norm", "grad norm {:.3f}"),
            ("iteration_time_s", "{:.2f} s/step"),
            ("samples_per_s", "{:.1f} samples/s"),
            ("mtp_1_loss", "mtp {:.4f}"),
        )
        if values.get(name) is not None
    ]
    return " | ".join(parts)


def validation_line(values: Mapping[str, Any]) -> str:
    """The line of one validation: every `eval_` value under its name without the prefix."""
    results = [
        f"{name.removeprefix('eval_')} {f'{value:.4f}' if isinstance(value, float) else value}"
        for name, value in values.items()
        if name.startswith("eval_")
    ]
    return " | ".join([f"validation at iteration {values['iteration']}", *results])


def duration(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
