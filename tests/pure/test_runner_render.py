"""What is started is rendered as text by pure functions: exact, quoted, and the same as what a shell understands."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flagscale.config.schema import (
    CmdsConfig,
    Config,
    ExperimentConfig,
    RunnerConfig,
    SlurmConfig,
    SystemConfig,
    TaskConfig,
)
from flagscale.runner import render, sbatch

GOLDEN = Path(__file__).parents[1] / "golden" / "runner"
AWKWARD = {
    "PLAIN": "x",
    "SPACES": "two words",
    "QUOTES": """it's "so" """,
    "DOLLAR": "$HOME `id` $(id) !!",
    "JSON": {"a": [1, True, None], "ü": "ß"},
    "UNICODE": "数据 ✓",
    "LINES": "one\ntwo",
    "NUMBER": 3,
    "FRACTION": 0.5,
    "YES": True,
    "NO": False,
    "GONE": None,
    "EMPTY": "",
}


COMMANDS = CmdsConfig(before_start="module load cuda && ulimit -n 65536", after_stop='rm -rf "/scratch/$USER"')


def config(envs: dict[str, Any] | None = None, cmds: CmdsConfig = CmdsConfig(), **runner: Any) -> Config:  # noqa: B008
    """A configuration as far as rendering looks at it."""
    experiment = ExperimentConfig(
        exp_dir="/runs/it's a $run",
        task=TaskConfig(entrypoint="/code/train me.py"),
        runner=RunnerConfig(**runner),
        envs=envs or {},
        cmds=cmds,
        node_envs={"fd00::2": {"NUMBER": 4, "ONLY_HERE": "x y"}},
    )
    return Config(experiment=experiment, model=None, data=None)  # type: ignore[arg-type]


def script(configuration: Config) -> str:
    node = None
    if configuration.experiment.runner.type == "ssh":
        home = Path("/runs/it's a $run/nodes/1")
        node = render.Node(index=1, home=home, address="fd00::2", head="fd00::1", port=29500)
    return render.launch_script(
        render.torchrun_command(configuration, Path("/runs/it's a $run"), python="/venv/bin/python", node=node),
        surroundings(configuration),
    )


def surroundings(configuration: Config) -> render.Script:
    host = "fd00::2" if configuration.experiment.runner.type == "ssh" else None
    return render.Script(
        variables=render.environment(configuration, cores=8, host=host),
        workdir=Path("/work/my project"),
        import_root=Path("/code"),
        cmds=configuration.experiment.cmds,
    )


@pytest.mark.parametrize(
    ("name", "configuration"),
    [
        ("local", config()),
        ("awkward", config(AWKWARD, nproc_per_node=2, master_port=29500)),
        ("second_of_two", config({"NUMBER": 3}, type="ssh", nnodes=2, max_restarts=3)),
        ("commands", config(cmds=COMMANDS)),
    ],
)
def test_launch_script_is_as_recorded(name: str, configuration: Config) -> None:
    assert script(configuration) == (GOLDEN / f"{name}.sh").read_text()


def test_slurm_scripts_are_as_recorded() -> None:
    slurm = SlurmConfig(partition="gpu", time_limit=90, gpus_per_node=8, cpus_per_task=64, options=["--exclusive"])
    configuration = config({"TOKEN": "a b"}, type="slurm", nnodes=2, nproc_per_node=8, slurm=slurm, max_restarts=1)
    exp_dir = Path("/runs/it's a 100% $run")
    assert sbatch.batch_script(configuration, exp_dir) == (GOLDEN / "slurm.sbatch").read_text()
    script = replace(surroundings(configuration), setup=sbatch.node_setup(configuration, exp_dir))
    command = render.torchrun_command(configuration, exp_dir, python="/venv/bin/python")
    assert render.launch_script(command, script) == (GOLDEN / "slurm.sh").read_text()


def test_job_that_is_not_requeued_does_not_end_as_if_it_were_finished() -> None:
    configuration = config(type="slurm", slurm=SlurmConfig(requeue=False))
    text = sbatch.batch_script(configuration, Path("/runs"))
    assert "#SBATCH --no-requeue" in text
    assert "scontrol requeue" not in text
    assert 'rm "$left"' in text
    assert f"    exit {sbatch.UNFINISHED}" in text


def test_wrapped_script_is_the_same_arguments() -> None:
    command = render.torchrun_command(config(), Path("/runs/it's a $run"))
    text = render.launch_script(command, surroundings(config()))
    assert shlex.split(text[text.index("exec ") :].replace("\\\n", " "))[1:] == command


def test_free_port_is_left_to_the_operating_system() -> None:
    assert "127.0.0.1:0" in render.torchrun_command(config(), Path("/runs"))
    assert "127.0.0.1:29511" in render.torchrun_command(config(master_port=29511), Path("/runs"))


@pytest.mark.parametrize(
    ("cores", "ranks", "given", "threads"), [(8, 4, None, "2"), (2, 4, None, "1"), (8, 4, 5, "5"), (9, 2, None, "4")]
)
def test_threads_of_a_rank(cores: int, ranks: int, given: int | None, threads: str) -> None:
    configuration = replace(config(nproc_per_node=ranks), system=SystemConfig(threads_per_rank=given))
    assert render.environment(configuration, cores=cores)["OMP_NUM_THREADS"] == threads


def test_users_variables_win_and_keep_their_type() -> None:
    variables = render.environment(config({**AWKWARD, "OMP_NUM_THREADS": 7}), cores=8)
    assert variables["OMP_NUM_THREADS"] == "7"
    assert (variables["YES"], variables["NO"], variables["GONE"], variables["EMPTY"]) == ("1", "0", None, "")
    assert variables["JSON"] == '{"a": [1, true, null], "ü": "ß"}'


@pytest.mark.parametrize("platform", ["auto", "cpu", "cuda"])
def test_cuda_issues_kernels_in_one_order(platform: str) -> None:
    variables = render.environment(replace(config(), system=SystemConfig(platform=platform)), cores=8)
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in variables) == (platform != "cpu")


@pytest.mark.parametrize("root", [Path("/code"), None])
def test_bash_sees_the_variables_as_they_were_given(root: Path | None, tmp_path: Path) -> None:
    program = "import json, os, sys; json.dump(dict(os.environ), sys.stdout)"
    configuration = config({**AWKWARD, "PYTHONPATH": "/mine"})
    script = replace(surroundings(configuration), workdir=tmp_path, import_root=root)
    text = render.launch_script([sys.executable, "-c", program], script)
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "GONE": "here"}
    )
    seen, given = json.loads(done.stdout), render.environment(configuration, cores=8)
    given["PYTHONPATH"] = "/mine" if root is None else "/code:/mine"
    assert {name: seen.get(name) for name in given} == given
