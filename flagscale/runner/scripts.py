"""The launch scripts of a plan, as text and as files."""

from __future__ import annotations

import os
import site
from dataclasses import replace
from pathlib import Path

import flagscale
from flagscale.plan.plan import ExperimentPlan
from flagscale.runner import render, sbatch


def local_script(plan: ExperimentPlan, workdir: Path) -> str:
    """The script that starts all ranks on this machine."""
    return render.launch_script(list(plan.command), _surroundings(plan, workdir, _cores()))


def node_script(plan: ExperimentPlan, workdir: Path, node: render.Node, cores: int) -> str:
    """The script that starts the ranks of one host of the ssh runner.

    Args:
        cores: CPU cores of that host.
    """
    command = render.torchrun_command(plan.config, plan.exp_dir, node=node)
    return render.launch_script(command, _surroundings(plan, workdir, cores, host=node.address))


def slurm_scripts(plan: ExperimentPlan, workdir: Path) -> dict[Path, str]:
    """Path and text of the batch script, and of the script that it starts on every node."""
    runner = plan.config.experiment.runner
    script = _surroundings(plan, workdir, runner.slurm.cpus_per_task or runner.nproc_per_node)
    script = replace(script, setup=sbatch.node_setup(plan.config, plan.exp_dir))
    return {
        plan.exp_dir / "launch.sbatch": sbatch.batch_script(plan.config, plan.exp_dir),
        plan.exp_dir / "launch.sh": render.launch_script(list(plan.command), script),
    }


def _surroundings(plan: ExperimentPlan, workdir: Path, cores: int, host: str | None = None) -> render.Script:
    return render.Script(
        variables=render.environment(plan.config, cores=cores, host=host),
        workdir=workdir,
        import_root=import_root(),
        cmds=plan.config.experiment.cmds,
    )


def import_root() -> Path | None:
    """The folder that holds the package; None where it is installed among the interpreter's own packages.

    Those must not be on PYTHONPATH: every Python that a job starts, of other versions too, would take them for its own.
    """
    folder = Path(flagscale.__file__).resolve().parent.parent
    installed = (*site.getsitepackages(), site.getusersitepackages())
    return None if folder in (Path(place).resolve() for place in installed) else folder


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner reads and runs: scripts may hold secrets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o700)
    path.write_text(text, encoding="utf-8")
