"""The ssh runner against real ssh servers on several addresses of this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flagscale.runner import processes
from flagscale.runner.record import load_record
from tests.data.helpers import small_digits
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


def wait_for(cluster: Cluster, process: subprocess.Popen[str] | None, count: int) -> None:
    """Until the job has that many ranks that have written their pid."""
    deadline = time.monotonic() + 120
    while len(list(cluster.exp_dir.glob("rank*.pid"))) < count:
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_hosts_end_well_and_are_heard(cluster: Cluster) -> None:
    code, output = cluster.run(
        **{"+experiment.envs.SECRET": "'a b $c'"}, experiment__node_envs="{127.0.0.3: {WHERE: three}}"
    )
    assert code == 0, output
    assert "iteration 240/240" in output
    for host in ("127.0.0.2", "127.0.0.3"):
        for local_rank in (0, 1):
            assert f"[{host}:{local_rank}] rank " in output
    assert output.count("of 4 is done") == 4
    assert output.count("WHERE three") == 2
    assert "a b $c" not in output
    code, output = cluster.run(action="query")
    assert code == 0
    assert output.count("finished with exit code 0") == 3, "the launcher and both hosts"


def test_rank_that_raises_ends_both_hosts(cluster: Cluster) -> None:
    code, output = cluster.run(**{"+experiment.envs.TINY_MODE": "raise"})
    assert code == 1, output
    assert "ValueError: the loss is nan" in output
    assert "failed with exit code 1" in output
    assert cluster.members == []


def test_rank_that_raises_once_is_started_again_on_both_hosts(cluster: Cluster) -> None:
    code, output = cluster.run(**{"+experiment.envs.TINY_MODE": "raise_once"}, experiment__runner__max_restarts=1)
    assert code == 0, output
    assert "ValueError: the loss is nan" in output
    assert all(f"rank {rank} of 4 is done" in output for rank in range(4))
    assert "restart on" not in output, "by torchrun: no host was lost"


def test_background_job_is_queried_and_stopped_on_all_hosts(cluster: Cluster) -> None:
    assert "never started" in cluster.run(action="stop")[1]
    code, output = cluster.run(**{"+experiment.envs.TINY_MODE": "wait"}, experiment__runner__detach="true")
    assert (code, "started in the background" in output) == (0, True), output
    wait_for(cluster, None, 4)
    output = cluster.run(action="query")[1]
    assert output.count("running since") == 3, "the launcher and both hosts"
    assert "iteration 240/240" in output
    code, output = cluster.run()
    assert (code, "a job runs in this folder" in output) == (2, True)
    for words in ("stopped", "nothing to stop"):
        code, output = cluster.run(action="stop")
        assert (code, words in output) == (0, True), output
        assert cluster.members == []
    record = load_record(cluster.exp_dir)
    assert record is not None
    assert (record.state, record.exit_code) == ("stopped", 128 + signal.SIGTERM)


def test_killed_launcher_leaves_nothing(cluster: Cluster) -> None:
    job = cluster.start(**{"+experiment.envs.TINY_MODE": "wait"})
    wait_for(cluster, job, 4)
    job.kill()
    job.wait()
    deadline = time.monotonic() + 60
    while cluster.members:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_lost_host_and_a_restart_on_the_other(tmp_path: Path, servers: Servers, hosts: tuple[Server, Server]) -> None:
    doomed = servers.start("127.0.0.4")
    cluster = Cluster(tmp_path, servers, hosts[0], doomed)
    own = {"experiment.runner.max_restarts": 1, "experiment.runner.min_nnodes": 1}
    job = cluster.start(**own, **{"+experiment.envs.TINY_MODE": "wait_if_4"})
    wait_for(cluster, job, 4)
    servers.kill(doomed)
    output, _ = job.communicate(timeout=240)
    assert job.returncode == 0, output
    assert "host 127.0.0.4 is left out: cannot be reached" in output
    assert "restart on 1 hosts; 0 restarts left" in output
    assert output.count("of 2 is done") == 2
    assert json.loads((cluster.exp_dir / "plan.json").read_text())["world_size"] == 2


def test_preflight_names_what_is_wrong_where(
    tmp_path: Path, servers: Servers, hosts: tuple[Server, Server], cluster: Cluster
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    alone = servers.start("127.0.0.5", private=private)
    gone = Server(address="127.0.0.6", port=hosts[0].port, process=hosts[0].process)
    hostfile = servers.hostfile(hosts[0], alone, gone)
    cluster.exp_dir = private / "run"
    code, output = cluster.run(
        experiment__runner__hostfile=hostfile,
        experiment__runner__nnodes=3,
        experiment__exp_dir=cluster.exp_dir,
        experiment__runner__nproc_per_node=2,
        model__tensor_model_parallel_size=1,
        model__global_batch_size=24,
        model__vision_micro_batch_size=4,
        experiment__runner__master_port=hosts[0].port,
    )
    assert code == 2, output
    assert f"host 127.0.0.2: has no free port {hosts[0].port}" in output
    assert f"host 127.0.0.5: does not see experiment.exp_dir {cluster.exp_dir}" in output
    assert "host 127.0.0.6: cannot be reached (ssh: connect to host 127.0.0.6" in output
    assert "127.0.0.6  -" in output, "the table"
    assert sorted(path.name for path in cluster.exp_dir.iterdir()) == ["run.lock"], "nothing was started or written"


def test_host_without_the_shared_folder(tmp_path: Path, servers: Servers, cluster: Cluster) -> None:
    private = tmp_path / "private"
    private.mkdir()
    hostfile = servers.hostfile(servers.start("127.0.0.7", private=private))
    cluster.exp_dir = private / "run"
    code, output = cluster.run(
        experiment__runner__hostfile=hostfile,
        experiment__runner__nnodes=1,
        experiment__exp_dir=cluster.exp_dir,
        experiment__runner__no_shared_fs="true",
    )
    assert code == 0, output
    assert "iteration 240/240" in output
    assert len((cluster.exp_dir / "metrics.jsonl").read_text().splitlines()) == 240
    assert not list(cluster.exp_dir.glob("nodes/*")), "the host's files stay on the host"


@pytest.mark.timeout(600)
def test_two_hosts_train_the_demo(cluster: Cluster, tmp_path: Path) -> None:
    small = ("hidden_size", "vision_hidden_size", "kv_channels"), ("ffn_hidden_size", "vision_ffn_hidden_size")
    sizes = {f"model.{name}": size for names, size in zip(small, (32, 48), strict=True) for name in names}
    code, output = cluster.run(
        **sizes,
        model__num_layers=2,
        model__full_attention_interval=2,
        model__linear_num_value_heads=4,
        model__global_batch_size=16,
        model__train_iters=2,
        model__eval_interval="null",
        data__train_path=small_digits() / "train.jsonl",
        data__valid_path="null",
        experiment__task__entrypoint=ROOT / "flagscale/train/megatron/train_qwen35.py",
        system__logging__wandb="false",
        system__logging__tensorboard="false",
    )
    assert code == 0, output
    assert "iteration 2/2" in output
    assert "LLM TP2/PP1/DP2" in output
    assert (cluster.exp_dir / "checkpoints/iter_0000002").is_dir()
