"""The ssh runner against real ssh servers on several addresses of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flagscale.runner import processes
from flagscale.runner.record import load_record
from tests.runner.sshd import Server, Servers

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("ssh") / "servers")
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def hosts(servers: Servers) -> tuple[Server, Server]:
    return servers.start("127.0.0.2"), servers.start("127.0.0.3")


class Cluster:
    """A run of two hosts with two ranks each, and `run.py` on it."""

    def __init__(self, folder: Path, servers: Servers, *hosts: Server) -> None:
        self.exp_dir = folder / "a $run"
        samples = folder / "samples.jsonl"
        samples.write_text('{"messages": []}\n')
        self.settings = {
            "experiment.exp_dir": f"'{self.exp_dir}'",
            "experiment.task.entrypoint": HERE / "tiny_trainer.py",
            "experiment.runner.type": "ssh",
            "experiment.runner.hostfile": f'"{servers.hostfile(*hosts)}"',
            "experiment.runner.ssh_options": f'[-F,"{servers.client}"]',
            "experiment.runner.nnodes": len(hosts),
            "experiment.runner.nproc_per_node": 2,
            "experiment.runner.stop_grace": 2,
            "+experiment.envs.GLOO_SOCKET_IFNAME": "lo",
            "data.train_path": samples,
            "data.valid_path": samples,
            "system.platform": "cpu",
        }

    def start(self, **settings: object) -> subprocess.Popen[str]:
        """`run.py`; a double underscore stands for a dot."""
        own = {name.replace("__", "."): value for name, value in settings.items()}
        overrides = [f"{name}={value}" for name, value in {**self.settings, **own}.items()]
        return subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, **settings: object) -> tuple[int, str]:
        """Exit code and output of `run.py`."""
        process = self.start(**settings)
        output, _ = process.communicate(timeout=240)
        assert "Traceback" not in output or "ValueError: the loss is nan" in output, output
        return process.returncode, output

    @property
    def members(self) -> list[int]:
        """Processes of the job on any host."""
        records = [load_record(home) for home in self.exp_dir.glob("nodes/*")]
        return [pid for record in records if record for pid in processes.members(record.run_id)]


@pytest.fixture
def cluster(tmp_path: Path, servers: Servers, hosts: tuple[Server, Server]) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, servers, *hosts)
    yield cluster
    processes.send(cluster.members, signal.SIGKILL)


def wait_for(cluster: Cluster, process: subprocess.Popen[str], count: int) -> None:
    """Until the job has that many ranks that have written their pid."""
    deadline = time.monotonic() + 120
    while len(list(cluster.exp_dir.glob("rank*.pid"))) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_hosts_end_well_and_are_heard(cluster: Cluster) -> None:
    code, output = cluster.run(**{"+experiment.envs.SECRET": "'a b $c'"}, experiment__node_envs="{127.0.0.3: {WHERE: three}}")
    assert code == 0, output
    assert "iteration 300/300" in output
    for host in ("127.0.0.2", "127.0.0.3"):
        for local_rank in (0, 1):
            assert f"[{host}:{local_rank}] rank " in output
    assert output.count("of 4 is done") == 4
    assert output.count("WHERE three") == 2
    assert "a b $c" not in output
    code, output = cluster.run(action="query")
    assert code == 0
    assert output.count("finished with exit code 0") == 3, "the launcher and both hosts"
