"""What the ssh runner starts on a host: `python -m flagscale.runner.node check|run|stop|query`.

The first line on standard input is a request, JSON, so that nothing of it appears in a process list. The rest of
standard input is a lifeline: when it ends, because the launcher or the connection has gone, the job on this host ends.
Answers and logs go to standard output.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flagscale
from flagscale.config.errors import UserError
from flagscale.plan.devices import visible_gpus
from flagscale.runner import control, failure
from flagscale.runner.local import LocalJob, run_foreground
from flagscale.runner.progress import Console, LineFollower
from flagscale.runner.record import claim, load_record
from flagscale.runner.scripts import write_private

PACKAGES = ("torch", "megatron-core", "numpy", "omegaconf", "transformers")
"""Packages that must be equal on all hosts."""
FORWARDED = "\x1e"
"""Starts a line that carries `<file> <line>` for the launcher's own folder rather than text for the terminal."""
FORWARDED_FILES = ("metrics.jsonl", "logs/console.log")


def main() -> int:
    """Serve one request."""
    action = sys.argv[1]
    request = json.loads(sys.stdin.readline())
    try:
        if action == "check":
            sys.stdout.write(json.dumps(facts(request)) + "\n")
            return 0
        home, console = Path(request["home"]), Console(sys.stdout)
        if action == "query":
            console.line(control.state_of(home))
            return 0
        if action == "stop":
            return control.stop(home, request["stop_grace"], console)
        return run(request)
    except UserError as error:
        sys.stdout.write(f"error: {error}\n")
        return 2


def facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the preflight compares; reads only.

    Args:
        request: `home`, `exp_dir`, `token` (a file of exp_dir), `entrypoint`, `workdir`, `port` (null: choose one, 0:
            none is needed), `head` (name of the first host).
    """
    record = load_record(Path(request["home"]))
    entrypoint = Path(request["entrypoint"])
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "code": code_hash(entrypoint),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": visible_gpus(),
        "workdir": Path(request["workdir"]).is_dir(),
        "sees_exp_dir": (Path(request["exp_dir"]) / request["token"]).is_file(),
        "can_write": _can_write(Path(request["exp_dir"])),
        "busy": record is not None and record.is_alive,
        "port": _free_port(request["port"]),
        "resolves": _resolves(request["head"]),
    }


def code_hash(entrypoint: Path) -> str:
    """A digest of the package's Python files and the entrypoint; empty when the entrypoint is missing."""
    package = Path(flagscale.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    try:
        digest.update(entrypoint.read_bytes())
    except OSError:
        return ""
    return digest.hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _can_write(folder: Path) -> bool:
    """Whether the folder, or the nearest one above it that exists, can be written."""
    place = next(place for place in (folder, *folder.parents) if place.exists())
    return place.is_dir() and os.access(place, os.W_OK)


def _free_port(wanted: int | None) -> int | None:
    """The wanted port, or any for None, if it can be bound; None when it is taken."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", wanted or 0))
        except OSError:
            return None
        return int(listener.getsockname()[1])


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def run(request: Mapping[str, Any]) -> int:
    """Write the files of the request, run the node's launch script, and return the job's exit code.

    Args:
        request: `name` (prefix of lines), `exp_dir`, `home`, `files` (path -> text), `stop_grace`, `train_iters`,
            `forward` (whether metrics and sentences go to the launcher).
    """
    home, exp_dir = Path(request["home"]), Path(request["exp_dir"])
    job = LocalJob(
        exp_dir=exp_dir,
        home=home,
        command=["bash", str(home / "launch.sh")],
        train_iters=request["train_iters"],
        log_interval=1,
        stop_grace=request["stop_grace"],
    )
    with claim(home):
        for path, text in request["files"].items():
            write_private(Path(path), text)
        threading.Thread(target=_end_with_launcher, daemon=True).start()
        view = NodeView(job, request["name"], forward=request["forward"])
        return run_foreground(job, PrefixConsole(request["name"]), view=view)


def _end_with_launcher() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


class PrefixConsole(Console):
    """A console whose every line starts with the name of the host."""

    def __init__(self, name: str) -> None:
        super().__init__(sys.stdout)
        self._name = name

    def line(self, text: str) -> None:
        """A line that stays."""
        for part in text.split("\n"):
            super().line(f"[{self._name}] {part}")


class NodeView:
    """Passes on what torchrun and the ranks of this host print, and with `forward` the run's own files.

    Lines of a rank start with `[host:local rank]`.
    """

    def __init__(self, job: LocalJob, name: str, *, forward: bool) -> None:
        self._job = job
        self._name = name
        self._console = Console(sys.stdout)
        self._followers = [(f"[{name}]", LineFollower(job.logs / failure.TORCHRUN_LOG, from_start=True))]
        if forward:
            self._followers += [(FORWARDED + file, LineFollower(job.exp_dir / file)) for file in FORWARDED_FILES]
        self._known = self._rank_logs()

    def poll(self) -> None:
        """Print what is new."""
        for path in sorted(self._rank_logs() - self._known):
            self._known.add(path)
            self._followers.append((f"[{self._name}:{path.parent.name}]", LineFollower(path, from_start=True)))
        for prefix, follower in self._followers:
            for line in follower.poll():
                self._console.line(f"{prefix} {line}")

    def _rank_logs(self) -> set[Path]:
        return set(self._job.logs.glob("*/attempt_*/*/std*.log"))


if __name__ == "__main__":
    sys.exit(main())
