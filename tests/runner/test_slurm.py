"""The Slurm runner against a real controller and two virtual nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.data.helpers import small_digits
from tests.runner.ranks import check_restarted, checkpoints, iterations_of, rank_process
from tests.runner.slurm_cluster import SlurmCluster

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TINY = (
    "model.hidden_size=32", "model.ffn_hidden_size=48", "model.vision_hidden_size=32",
    "model.vision_ffn_hidden_size=48", "model.linear_num_value_heads=4", "model.kv_channels=32",
    "model.num_layers=2", "model.full_attention_interval=2", "model.global_batch_size=16", "model.eval_interval=null",
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


    @property
    def job_id(self) -> int:
        """Slurm's name for the job."""
        return int(json.loads((self.exp_dir / "slurm.json").read_text())["job_id"])

    def ask_queue(self, form: str) -> str:
        """What squeue prints of the job in a format."""
        return self.cluster.ask("squeue", "--noheader", f"--jobs={self.job_id}", f"--format={form}").strip()


def wait_for(job: subprocess.Popen[str], condition: Callable[[], bool], seconds: float = 240) -> None:
    """Until a condition holds, while the job's follower runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


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
    wait_for(follower, lambda: len(list(run.exp_dir.glob("rank*.pid"))) == 4)
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


def test_lost_node_puts_the_job_back_into_the_queue(run: Run) -> None:
    follower = run.start("+experiment.envs.TINY_MODE=wait_once")
    wait_for(follower, lambda: len(list(run.exp_dir.glob("rank*.pid"))) == 4)
    run.cluster.ask("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    wait_for(follower, lambda: run.ask_queue("%T %r") != "RUNNING None")
    run.cluster.ask("scontrol", "update", "NodeName=n2", "State=RESUME")
    output, _ = follower.communicate(timeout=240)
    assert follower.returncode == 0, output
    assert "requeued 1 times" in output
    assert "COMPLETED on n[1-2]" in output


def start_demo(run: Run, *overrides: str, **settings: object) -> subprocess.Popen[str]:
    """The demo in small and paced, a rank on each node, submitted and followed."""
    del run.settings["data.valid_path"]
    return run.start(
        *TINY,
        *overrides,
        experiment__task__entrypoint=HERE / "paced_trainer.py",
        experiment__runner__nproc_per_node=1,
        data__train_path=small_digits() / "train.jsonl",
        model__tensor_model_parallel_size=1,
        **settings,
    )


@pytest.mark.timeout(600)
def test_killed_rank_is_restarted_from_the_newest_checkpoint(run: Run) -> None:
    """By torchrun, inside the job: Slurm does not notice."""
    iterations = 8
    job = start_demo(
        run,
        experiment__runner__max_restarts=1,
        model__train_iters=iterations,
        system__checkpoint__save_interval=2,
    )
    wait_for(job, (run.exp_dir / "checkpoints/iter_0000002").exists)
    os.kill(rank_process(f"SLURM_JOB_ID={run.job_id}", 1), signal.SIGKILL)
    output, _ = job.communicate(timeout=500)
    assert job.returncode == 0, output
    assert "requeued 0 times" in output
    assert "requeued 1 times" not in output
    check_restarted(run.exp_dir, output, iterations)


@pytest.mark.timeout(900)
def test_job_is_requeued_before_its_time_limit_and_resumes(run: Run) -> None:
    """Slurm warns at its first look at the limit, 5 to 35 s after the start; ended here once it has resumed."""
    job = start_demo(
        run,
        "experiment.runner.slurm.time_limit=1",
        "experiment.runner.slurm.signal_before=25",
        model__train_iters=100_000,
        system__checkpoint__save_interval=100_000,
    )
    sentences = run.exp_dir / "logs/console.log"
    wait_for(job, lambda: sentences.exists() and "resumed from" in sentences.read_text(), 600)
    (_, left), (_, resumed), *_ = checkpoints(sentences.read_text())
    assert resumed == left
    wait_for(job, lambda: iterations_of(run.exp_dir)[-1] > resumed)
    assert "stopped" in run.run(action="stop")[1]
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM, output
    assert "has saved and goes back to the queue" in output
    assert "requeued 1 times" in output
    done = iterations_of(run.exp_dir)
    assert done == list(range(1, len(done) + 1)), "none lost, none twice"
