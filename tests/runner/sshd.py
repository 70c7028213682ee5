"""Real ssh servers on loopback addresses: own keys, own ports, nobody's ~/.ssh."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from flagscale.runner import processes

SERVER = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/client_key.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
LogLevel ERROR
"""
CLIENT = """\
IdentityFile {folder}/client_key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
LogLevel ERROR
"""


@dataclass(kw_only=True, slots=True)
class Server:
    """One sshd. With `private` its sessions see an own, empty folder there, as on a host without a shared one."""

    address: str
    port: int
    process: subprocess.Popen[bytes]


class Servers:
    """Ssh servers in a folder; `client` is the configuration file that ssh needs to reach them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = folder / "client.conf"
        self.running: list[Server] = []
        folder.mkdir(parents=True)
        for name in ("host_key", "client_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)], check=True
            )
        self.client.write_text(CLIENT.format(folder=folder))

    def start(self, address: str, *, private: Path | None = None) -> Server:
        """Start a server on a free port of a loopback address and wait until it listens."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd separates privileges there
        port = free_port(address)
        config = self.folder / f"sshd-{address}.conf"
        config.write_text(SERVER.format(address=address, port=port, folder=self.folder))
        key = (self.folder / "host_key.pub").read_text().rsplit(" ", 1)[0]
        with (self.folder / "known_hosts").open("a") as known:
            known.write(f"[{address}]:{port} {key}\n")
        command = [str(shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin")), "-D", "-e", "-f", str(config)]
        if private is not None:
            mount = f'mount -t tmpfs none {private} && exec "$@"'
            command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh", *command]
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=processes.die_with_parent)
        server = Server(address=address, port=port, process=process)
        self.running.append(server)
        deadline = time.monotonic() + 20
        while True:
            assert process.poll() is None, "sshd ended"
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
                return server
            assert time.monotonic() < deadline, "sshd does not listen"
            time.sleep(0.1)

    def hostfile(self, *servers: Server) -> Path:
        """A hostfile that names the servers."""
        path = self.folder / "hosts"
        lines = [f"{getpass.getuser()}@{server.address}:{server.port} slots=2" for server in servers]
        path.write_text("# the test's hosts\n" + "\n".join(lines) + "\n")
        return path

    def kill(self, server: Server) -> None:
        """End a server and every connection to it at once, as when a machine goes down."""
        children = _descendants(server.process.pid)
        for pid in (server.process.pid, *children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.process.wait()

    def close(self) -> None:
        """End all servers."""
        for server in self.running:
            if server.process.poll() is None:
                self.kill(server)


def free_port(address: str) -> int:
    with socket.socket() as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                text = (entry / "stat").read_text()
                if int(text[text.rindex(")") + 2 :].split()[1]) == pid:
                    found += [int(entry.name), *_descendants(int(entry.name))]
    return found
