"""The Slurm runner against a real controller and two virtual nodes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runner.slurm_cluster import SlurmCluster
from tools.data import make_digits

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TINY = (
    "model.hidden_size=32", "model.ffn_hidden_size=48", "model.vision_hidden_size=32",
    "model.vision_ffn_hidden_size=48", "model.linear_num_value_heads=4", "model.kv_channels=32",
    "model.global_batch_size=16", "model.eval_interval=null",
    "system.logging.wandb=false", "system.logging.tensorboard=false", "data.valid_path=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


class Run:
    """`run.py` on the cluster, with a folder of its own."""

    def __init__(self, folder: Path, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.exp_dir = folder / "it's 100% a $run"
        samples = folder / "samples.jsonl"
        samples.write_text('{"messages": []}\n')
        self.settings = {
            "experiment.exp_dir": f'"{self.exp_dir}"',
            "experiment.task.entrypoint": HERE / "tiny_trainer.py",
            "experiment.runner.type": "slurm",
            "experiment.runner.nnodes": 2,
            "experiment.runner.nproc_per_node": 2,
            "experiment.runner.slurm.partition": "test",
            "+experiment.envs.GLOO_SOCKET_IFNAME": "lo",
            "data.train_path": samples,
            "data.valid_path": samples,
            "system.platform": "cpu",
        }

    def start(self, *overrides: str, **settings: object) -> subprocess.Popen[str]:
        own = {name.replace("__", "."): value for name, value in settings.items()}
        named = [f"{name}={value}" for name, value in {**self.settings, **own}.items()]
        return subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), *named, *overrides],
            env=self.cluster.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *overrides: str, **settings: object) -> tuple[int, str]:
        """Exit code and output of `run.py`."""
        output, _ = (process := self.start(*overrides, **settings)).communicate(timeout=280)
        return process.returncode, output


@pytest.fixture
def run(tmp_path: Path, cluster: SlurmCluster) -> Run:
    return Run(tmp_path, cluster)


def test_two_nodes_end_well_and_are_followed(run: Run) -> None:
    assert "never submitted" in run.run(action="query")[1]
    code, output = run.run()
    assert code == 0, output
    assert "job 1 on n[1-2], requeued 0 times" in output
    assert "iteration 240/240" in output
    assert "COMPLETED on n[1-2]" in output
    ranks = [path.read_text() for path in run.exp_dir.glob("nodes/n?/logs/*/attempt_0/*/stdout.log")]
    assert sorted(ranks) == [f"rank {rank} of 4 is done\n" for rank in range(4)]
    assert "COMPLETED on n[1-2], elapsed" in run.run(action="query")[1]


def test_failed_rank_is_shown(run: Run) -> None:
    code, output = run.run("+experiment.envs.TINY_MODE=raise", experiment__runner__nnodes=1)
    assert code == 1, output
    assert "ValueError: the loss is nan" in output


def test_cancelled_job(run: Run) -> None:
    follower = run.start("+experiment.envs.TINY_MODE=wait")
    deadline = time.monotonic() + 120
    while len(list(run.exp_dir.glob("rank*.pid"))) < 4:
        assert follower.poll() is None, follower.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert "RUNNING on n[1-2], elapsed" in run.run(action="query")[1]
    follower.send_signal(signal.SIGINT)
    output, _ = follower.communicate(timeout=60)
    assert follower.returncode == 128 + signal.SIGINT
    assert "goes on; action=stop ends it" in output
    code, output = run.run()
    assert code == 2, "one job a folder"
    assert "works in this folder" in output
    for words in ("stopped", "nothing to stop"):
        code, output = run.run(action="stop")
        assert (code, words in output) == (0, True), output
    for path in run.exp_dir.glob("rank*.pid"):
        assert not Path(f"/proc/{path.read_text()}").exists()


def test_sbatch_refuses(run: Run) -> None:
    code, output = run.run(experiment__runner__slurm__partition="nowhere")
    assert code == 2
    assert "sbatch refused the job" in output
    assert "Invalid partition" in output


def start_demo(run: Run, folder: Path, iterations: int, *overrides: str) -> subprocess.Popen[str]:
    """The demo in small, a rank on each node, submitted and followed."""
    make_digits.make(folder / "digits", seed=1, num_train=200)
    del run.settings["data.valid_path"]
    return run.start(
        *TINY,
        *overrides,
        "system.checkpoint.save_interval=100000",
        experiment__task__entrypoint=ROOT / "flagscale/train/megatron/train_qwen35.py",
        experiment__runner__nproc_per_node=1,
        data__train_path=folder / "digits/train.jsonl",
        model__train_iters=iterations,
        model__tensor_model_parallel_size=1,
    )


def check_requeued(run: Run, follower: subprocess.Popen[str], iterations: int) -> None:
    output, _ = follower.communicate(timeout=900)
    assert follower.returncode == 0, output
    assert "has saved and goes back to the queue" in output
    assert "requeued 1 times" in output
    assert "resumed from" in output
    lines = [json.loads(line) for line in (run.exp_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, iterations + 1)), "none lost, none done twice"


@pytest.mark.timeout(600)
def test_job_trains_is_warned_requeued_and_resumes(run: Run, tmp_path: Path) -> None:
    """The signal that Slurm sends before the time limit, sent at once."""
    follower = start_demo(run, tmp_path, 30)
    metrics, deadline = run.exp_dir / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert follower.poll() is None, follower.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job_id = json.loads((run.exp_dir / "slurm.json").read_text())["job_id"]
    run.cluster.ask("scancel", "--batch", "--signal=USR1", str(job_id))
    check_requeued(run, follower, 30)


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_job_is_requeued_before_its_time_limit(run: Run, tmp_path: Path) -> None:
    """Slurm itself warns, at its first look at the limit of a minute."""
    limits = ("experiment.runner.slurm.time_limit=1", "experiment.runner.slurm.signal_before=25")
    check_requeued(run, start_demo(run, tmp_path, 600, *limits), 600)
