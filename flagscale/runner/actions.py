"""What `run.py` does with a checked plan: run, test, stop, query, on the runner that the plan names."""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from flagscale.config.schema import Config
from flagscale.plan.plan import ExperimentPlan
from flagscale.plan.save import save_run_files
from flagscale.runner import background, control, local, remote, render, sbatch, slurm
from flagscale.runner.progress import Console
from flagscale.runner.record import claim, require_no_run
from flagscale.runner.scripts import local_script, write_private

TEST_ITERATIONS = 3


def dispatch(plan: ExperimentPlan, action: str, cwd: Path | None = None) -> int:
    """Start a job (`run`) or try it (`test`), and return the exit code of the program.

    Args:
        plan: checked; its paths are absolute.
        action: run or test.
        cwd: folder the job runs in; by default the current one.

    Raises:
        UserError: when a job runs in the folder already, or cannot be started.
    """
    assert action in ("run", "test"), f"no job is started by action {action!r}"
    start = _run if action == "run" else _test
    return start(plan, (cwd or Path.cwd()).resolve(), Console(sys.stdout))


def preview(plan: ExperimentPlan) -> str:
    """Write the plan for `action=dryrun`; returns what a run would hand to another program: Slurm's batch script.

    Raises:
        UserError: when a job is in the folder, which reads the plan again at a restart, or when it starts at last.
    """
    if plan.exp_dir.is_dir():  # saving says what is wrong with one that is none
        require_no_run(plan.exp_dir)
        slurm.require_no_job(plan.exp_dir)
    save_run_files(plan)
    if plan.config.experiment.runner.type != "slurm":
        return ""
    return sbatch.batch_script(plan.config, plan.exp_dir)


def attend(config: Config, action: str) -> int:
    """Query or stop the run in the configuration's folder, and return the exit code of the program.

    Args:
        config: only its folder and runner count, so it need not fit the machine or the data.
        action: query or stop.

    Raises:
        UserError: when the run is on another machine.
    """
    assert action in ("query", "stop"), f"no job is attended by action {action!r}"
    exp_dir, console, runner = Path(config.experiment.exp_dir), Console(sys.stdout), config.experiment.runner
    if runner.type == "slurm":
        return slurm.attend(config, action, console)
    if runner.type == "ssh":
        return remote.query(config, console) if action == "query" else remote.stop(config, console)
    if action == "query":
        return control.query(exp_dir, console)
    return control.stop(exp_dir, runner.stop_grace, console)


def _run(plan: ExperimentPlan, workdir: Path, console: Console) -> int:
    """Write the run's files and start the job."""
    prepare = {"local": _local_launch, "ssh": remote.launch, "slurm": slurm.launch}[plan.config.experiment.runner.type]
    with claim(plan.exp_dir):
        slurm.require_no_job(plan.exp_dir)
        launch = prepare(plan, workdir, console)
        # Slurm's jobs are in the background anyway: nobody has to stay with them.
        if plan.config.experiment.runner.detach and plan.config.experiment.runner.type != "slurm":
            return background.run_detached(plan.exp_dir, launch, console)
        return launch(console, lambda: None)


def _local_launch(plan: ExperimentPlan, workdir: Path, _console: Console) -> background.Launch:
    local.require_meeting_place(plan.config.experiment.runner)
    save_run_files(plan)
    script = plan.exp_dir / "launch.sh"
    write_private(script, local_script(plan, workdir))
    job = local.LocalJob(
        exp_dir=plan.exp_dir,
        home=plan.exp_dir,
        command=["bash", str(script)],
        train_iters=plan.config.model.train_iters,
        log_interval=plan.config.system.logging.log_interval,
        stop_grace=plan.config.experiment.runner.stop_grace,
    )
    return lambda console, started: local.run_foreground(job, console, on_started=started)


def _test(plan: ExperimentPlan, workdir: Path, console: Console) -> int:
    """A few iterations in a folder that is thrown away afterwards; it is kept, and named, when they fail."""
    folder = Path(tempfile.mkdtemp(prefix="flagscale-test-"))
    config = test_config(plan.config, folder)
    short = replace(plan, config=config, command=tuple(render.torchrun_command(config, folder)))
    code = _run(short, workdir, console)
    if code == 0:
        shutil.rmtree(folder)
        console.line(f"test passed: {short.config.model.train_iters} iterations, output thrown away")
    else:
        console.line(f"test failed with exit code {code}; its output is kept in {folder}")
    return code


def test_config(config: Config, folder: Path) -> Config:
    """The configuration of `action=test`: a few iterations, one short validation, in the foreground, no trackers."""
    iterations = min(TEST_ITERATIONS, config.model.train_iters)
    optimizer = replace(
        config.model.optimizer, lr_warmup_iters=min(config.model.optimizer.lr_warmup_iters, iterations - 1)
    )
    validates = config.model.eval_interval is not None
    model = replace(
        config.model,
        train_iters=iterations,
        eval_interval=iterations if validates else None,
        eval_iters=1,
        optimizer=optimizer,
    )
    experiment = replace(config.experiment, exp_dir=str(folder), runner=replace(config.experiment.runner, detach=False))
    system = replace(config.system, logging=replace(config.system.logging, wandb=False, tensorboard=False))
    return replace(config, experiment=experiment, model=model, system=system)
