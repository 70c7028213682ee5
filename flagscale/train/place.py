"""Where a rank is in its work, in a file beside its logs: there also after a signal ended it, for the launcher to read.

The file `place.json` is rewritten at every phase, a system call of some microseconds. It holds what the launcher says
when it finds that this rank has gone: `runner/failure.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from flagscale.config.schema import Config
from flagscale.plan.advice import memory_advice, peer_advice

FILE = "place.json"
START = "while starting"


class Place:
    """The current activity and, inside a step, the phase.

    Args:
        folder: of this rank's logs; None writes nothing.
        config: for what to advise.
    """

    def __init__(self, folder: Path | None = None, config: Config | None = None) -> None:
        self.activity, self.phase = START, ""
        self._config = config
        self._peer_advice = "" if config is None else peer_advice(config)
        self._advice: dict[str, str] = {}
        self._file = None if folder is None else os.open(folder / FILE, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        self._length = 0
        self._write()

    def __str__(self) -> str:
        return f"{self.activity}, phase {self.phase}" if self.phase else self.activity

    def begin(self, activity: str) -> None:
        """Starts something else, such as `in iteration 3`."""
        self.activity, self.phase = activity, ""
        self._write()

    def enter(self, phase: str) -> None:
        """Starts a phase of it."""
        self.phase = phase
        self._write()

    def _write(self) -> None:
        if self._file is None or self._config is None:
            return
        if self.phase not in self._advice:
            self._advice[self.phase] = memory_advice(self._config, self.phase)
        tree = {"where": str(self), "memory": self._advice[self.phase], "peer": self._peer_advice}
        text = json.dumps(tree).encode()
        # Never shortened: a reader between two writes would find half a text. Blanks at the end are no JSON error.
        self._length = max(self._length, len(text))
        os.pwrite(self._file, text.ljust(self._length), 0)


def log_folder() -> Path | None:
    """Folder of this rank's logs, which torchrun tells; None when it keeps none."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return Path(error_file).parent if error_file else None
