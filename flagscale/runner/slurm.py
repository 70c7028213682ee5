"""Runs a job through Slurm: submit, follow, query, stop. The controller owns the job; the launcher only looks on."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flagscale.config.errors import UserError
from flagscale.config.schema import Config
from flagscale.plan.plan import ExperimentPlan
from flagscale.plan.save import save_run_files
from flagscale.runner import control, failure
from flagscale.runner.background import Launch
from flagscale.runner.local import Signals
from flagscale.runner.progress import Console, LineFollower, Progress
from flagscale.runner.sbatch import LOG
from flagscale.runner.scripts import slurm_scripts, write_private

RECORD = "slurm.json"
_POLL_S = 1.0
_ANSWER_S = 60.0
_STOP_S = 60.0
_WAITING = (
    "PENDING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SUSPENDED",
    "CONFIGURING",
    "RESIZING",
    "SPECIAL_EXIT",
)
_ACTIVE = ("RUNNING", "RESIZING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", *_WAITING)
_FORGOTTEN = "FORGOTTEN"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmRecord:
    """The job that a folder was submitted as; `submitted_at` in seconds since 1970."""

    job_id: int
    submitted_at: float
    train_iters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What the controller says about a job; `state` is `FORGOTTEN` some minutes after its end."""

    state: str
    reason: str = ""
    nodes: str = ""
    elapsed: str = ""
    limit: str = ""
    exit_code: int = 0

    @property
    def is_active(self) -> bool:
        """Whether the job waits or runs."""
        return self.state in _ACTIVE

    def __str__(self) -> str:
        if self.state == _FORGOTTEN:
            return "ended some time ago; Slurm has forgotten how"
        if self.state in _WAITING:
            return f"{self.state} ({self.reason})"
        where = f" on {self.nodes}" if self.nodes else ""
        return f"{self.state}{where}, elapsed {self.elapsed} of {self.limit}"


def launch(plan: ExperimentPlan, workdir: Path, console: Console) -> Launch:
    """Write the scripts, and give back what submits and follows the job; the caller holds the folder's claim.

    Raises:
        UserError: Slurm is not here.
    """
    _require_slurm()
    save_run_files(plan)
    for path, text in slurm_scripts(plan, workdir).items():
        write_private(path, text)
    (plan.exp_dir / "logs").mkdir(exist_ok=True)
    return lambda console, started: _run(plan, console, started)


def _run(plan: ExperimentPlan, console: Console, started: Callable[[], None]) -> int:
    """Submit the job, and follow it unless it shall go on in the background."""
    (plan.exp_dir / "logs" / failure.USER_ERROR).unlink(missing_ok=True)
    runner = plan.config.experiment.runner
    log = LineFollower(plan.exp_dir / "logs" / LOG)
    progress = Progress(
        plan.exp_dir,
        console,
        train_iters=plan.config.model.train_iters,
        log_interval=plan.config.system.logging.log_interval,
    )
    record = _submit(plan)
    started()
    console.line(f"submitted as job {record.job_id}; log: {plan.exp_dir / 'logs' / LOG}")
    if runner.detach:
        console.line("the same command with action=query shows its state, with action=stop ends it")
        return 0
    return _follow(plan.exp_dir, record, (log, progress), console)


def _submit(plan: ExperimentPlan) -> SlurmRecord:
    script = plan.exp_dir / "launch.sbatch"
    answer = _slurm(["sbatch", "--parsable", str(script)])
    if answer.returncode != 0:
        raise UserError(f"{script}: sbatch refused the job ({_last_line(answer.stderr)}); see experiment.runner.slurm")
    record = SlurmRecord(
        job_id=submitted_id(answer.stdout),
        submitted_at=time.time(),
        train_iters=plan.config.model.train_iters,
    )
    temporary = plan.exp_dir / f".{RECORD}.{os.getpid()}"
    temporary.write_text(json.dumps(dataclasses.asdict(record)) + "\n")
    temporary.replace(plan.exp_dir / RECORD)
    return record


def submitted_id(text: str) -> int:
    """The job's number in what `sbatch --parsable` prints, `number` or `number;cluster`, below a site's own lines.

    Raises:
        UserError: when it says none.
    """
    line = _last_line(text)
    number = line.partition(";")[0]
    if not re.fullmatch(r"[0-9]+", number):
        raise UserError(f"sbatch names no job ({line or 'it prints nothing'}); squeue shows whether one waits")
    return int(number)


def _follow(exp_dir: Path, record: SlurmRecord, views: tuple[LineFollower, Progress], console: Console) -> int:
    """Show what the job writes until it ends; its exit code. A signal ends the following, not the job."""
    log, progress = views
    shown = ""
    with Signals().noted() as signals:
        while True:
            state = job_state(record.job_id)
            for line in log.poll():
                console.line(line)
            progress.poll()
            if state.is_active and state.state != "COMPLETING" and (text := f"{state.state} {state.nodes}") != shown:
                shown = text
                console.line(f"job {record.job_id}: {state}")
            if not state.is_active:
                return _ended(exp_dir, record, state, console)
            if signals.received:
                console.line(f"job {record.job_id} goes on; action=stop ends it, action=query shows its state")
                return 128 + signals.received[0]
            time.sleep(_POLL_S)


def _ended(exp_dir: Path, record: SlurmRecord, state: JobState, console: Console) -> int:
    """Report how a job ended; the exit code of the program."""
    console.keep_status()
    console.line(f"job {record.job_id}: {state}")
    if state.state == "COMPLETED":
        return 0
    message = failure.user_error(exp_dir / "logs")
    if message is not None:
        console.line(f"error: {message}")
        return 2
    for logs in sorted(exp_dir.glob("nodes/*/logs")):
        failure.link_rank_logs(logs, since=record.submitted_at)
        found = failure.first_failure(logs, since=record.submitted_at)
        if found.rank is not None and found.traceback:
            console.line(f"node {logs.parent.name}: {found.report()}")
            break
    return state.exit_code or 1


def query(exp_dir: Path, console: Console) -> int:
    """Show the job's state, nodes and time, and its last iteration; 0."""
    record = load_record(exp_dir)
    if record is None:
        console.line(f"{exp_dir}: never submitted")
        return 0
    state = job_state(record.job_id)
    console.line(f"{exp_dir}: job {record.job_id} {state}")
    control.show_last_iteration(exp_dir, record.train_iters, console, runs=state.state == "RUNNING")
    return 0


def stop(exp_dir: Path, console: Console) -> int:
    """Cancel the job, if it waits or runs, and wait until it has ended; 0 when it has."""
    record = load_record(exp_dir)
    state = None if record is None else job_state(record.job_id)
    if record is None or state is None or not state.is_active:
        what = "never submitted" if record is None else f"job {record.job_id} {state}"
        console.line(f"{exp_dir}: nothing to stop, {what}")
        return 0
    answer = _slurm(["scancel", str(record.job_id)])
    deadline = time.monotonic() + _STOP_S
    while job_state(record.job_id).is_active and time.monotonic() < deadline:
        time.sleep(_POLL_S / 2)
    ended = not job_state(record.job_id).is_active
    text = "stopped" if ended else f"does not end; {_last_line(answer.stderr) or 'Slurm still cleans up'}"
    console.line(f"{exp_dir}: job {record.job_id} {text}")
    return 0 if ended else 1


def require_no_job(exp_dir: Path) -> None:
    """No Slurm job works in the folder.

    Raises:
        UserError: when one waits or runs.
    """
    record = load_record(exp_dir)
    if record is not None and shutil.which("scontrol") and (state := job_state(record.job_id)).is_active:
        raise UserError(
            f"experiment.exp_dir={exp_dir}: Slurm job {record.job_id} works in this folder ({state}). Wait for it, end "
            "it with action=stop, or choose another experiment.exp_dir"
        )


def load_record(exp_dir: Path) -> SlurmRecord | None:
    """The record in a run's folder, None when nothing was submitted there.

    Raises:
        UserError: when the file is not a record.
    """
    path = exp_dir / RECORD
    try:
        return SlurmRecord(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not a record of a job ({error}); remove the file if no job runs there") from error


def job_state(job_id: int) -> JobState:
    """Ask the controller about a job.

    Raises:
        UserError: when the controller does not answer.
    """
    _require_slurm()
    answer = _slurm(["scontrol", "show", "job", "--oneliner", str(job_id)])
    if answer.returncode != 0:
        if "Invalid job id" in answer.stderr:
            return JobState(state=_FORGOTTEN)
        raise UserError(f"Slurm does not answer ({_last_line(answer.stderr)}); try again")
    return parse_job(answer.stdout)


def parse_job(text: str) -> JobState:
    """The state in the line that `scontrol show job --oneliner` prints."""
    values = dict(re.findall(r"(\w+)=(\S*)", text))
    code, _, number = values.get("ExitCode", "0:0").partition(":")
    state = values["JobState"]
    exit_code = 128 + int(number) if int(number or 0) else int(code)
    if state == "CANCELLED":
        exit_code = 128 + 15
    return JobState(
        state=state,
        reason=values.get("Reason", ""),
        nodes=values.get("NodeList", "").replace("(null)", ""),
        elapsed=values.get("RunTime", ""),
        limit=values.get("TimeLimit", ""),
        exit_code=exit_code,
    )


def attend(config: Config, action: str, console: Console) -> int:
    """Query or stop the job of the configuration's folder."""
    exp_dir = Path(config.experiment.exp_dir)
    return query(exp_dir, console) if action == "query" else stop(exp_dir, console)


def _slurm(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # SLURM_* of an allocation that run.py itself is started in would be taken as options.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_JOB", "SBATCH_", "SLURM_NTASKS"))
    }
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=False, env=environment, errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"Slurm does not answer: {command[0]} took more than {_ANSWER_S:g} s; try again") from error


def _require_slurm() -> None:
    missing = [name for name in ("sbatch", "scontrol", "scancel") if shutil.which(name) is None]
    if missing:
        raise UserError(
            f"experiment.runner.type = 'slurm': {', '.join(missing)} not found on this machine; start from a login "
            "node of the cluster"
        )


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""
