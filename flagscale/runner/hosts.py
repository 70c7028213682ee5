"""Reaching hosts over ssh: the command line of one connection, and one question to all hosts at once."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from flagscale.config.hostfile import Host
from flagscale.runner.scripts import import_root

CONNECT_S = 10
_OPTIONS = (
    "-T",  # no terminal: lines arrive as they were written
    "-o", "BatchMode=yes",  # never ask: a launcher of many hosts cannot answer
    "-o", f"ConnectTimeout={CONNECT_S}",
    "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3",  # a host that vanished is noticed in half a minute
)  # fmt: skip
LOST = 255
"""Exit code of ssh itself: no connection, or it broke."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a host said to a request."""

    code: int
    output: str
    complaint: str
    """Standard error, of ssh or of the host."""


def ssh_command(host: Host, action: str, options: Sequence[str], *, python: str = sys.executable) -> list[str]:
    """The command that serves one request (`runner.node`) on a host.

    The host needs the same interpreter and code at the same paths, which the preflight checks.
    """
    root = import_root()
    found = "" if root is None else f"PYTHONPATH={shlex.quote(str(root))} "
    served = f"{found}exec {shlex.quote(python)} -u -m flagscale.runner.node {action}"
    port = ["-p", str(host.port)] if host.port is not None else []
    # `sh -c`: the user's shell over there may be any.
    return ["ssh", *_OPTIONS, *options, *port, "--", host.target, f"exec sh -c {shlex.quote(served)}"]


def ask_all(
    hosts: Sequence[Host], action: str, requests: Sequence[Mapping[str, Any]], options: Sequence[str], timeout_s: float
) -> list[Answer]:
    """The answers of all hosts, asked at the same time, in their order.

    Args:
        requests: one a host.
        options: `experiment.runner.ssh_options`.
        timeout_s: longest wait for a host.
    """

    def ask(host: Host, request: Mapping[str, Any]) -> Answer:
        try:
            done = subprocess.run(
                ssh_command(host, action, options),
                input=json.dumps(request) + "\n",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer(code=LOST, output="", complaint=f"no answer within {timeout_s:g} s")
        return Answer(code=done.returncode, output=done.stdout, complaint=done.stderr.strip())

    with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
        return list(pool.map(ask, hosts, requests))
