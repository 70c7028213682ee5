"""A Slurm cluster of two virtual nodes on this machine: munged, slurmctld and two slurmd, started by a test.

A job that is requeued may start again after `cred_expire` seconds, which is two minutes by default. A job may run
`OverTimeLimit` minutes over its time limit, so that one which was warned of it saves on a busy machine too.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from flagscale.runner import processes
from tests.runner.sshd import free_port

CONFIG = """\
ClusterName=test
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=6
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
MessageTimeout=60
OverTimeLimit=10
KillWait=5
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={machine} Port={ports[1]} CPUs=4 RealMemory=1000
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname={machine} Port={ports[2]} CPUs=4 RealMemory=1000
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
_STARTED_S = 60.0


class SlurmCluster:
    """Two nodes, n1 and n2, with four CPUs each. `SLURM_CONF` set to `config` makes Slurm's commands talk to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self._processes: list[subprocess.Popen[bytes]] = []
        for name in ("state", "spool.n1", "spool.n2", "munge"):
            (folder / name).mkdir(parents=True)
        machine, ports = socket.gethostname().partition(".")[0], [free_port("127.0.0.1") for _ in range(3)]
        self.config.write_text(CONFIG.format(folder=folder, machine=machine, ports=ports, user=getpass.getuser()))

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that uses the cluster."""
        return {**os.environ, "SLURM_CONF": str(self.config)}

    def start(self) -> None:
        """Start all services, and wait until both nodes are idle."""
        munge = self.folder / "munge"
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        munge.chmod(0o711)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._spawn("munged", "--foreground", "--force", *(f"--{name}={munge / file}" for name, file in files.items()))
        self._wait_for(lambda: (munge / "socket").exists())
        self._spawn("slurmctld", "-D", "-i", "-c")
        for node in ("n1", "n2"):
            self._spawn("slurmd", "-D", "-c", "-N", node)
        self._wait_for(lambda: self.ask("sinfo", "--noheader", "--format=%t %D").split() == ["idle", "2"])

    def ask(self, *command: str) -> str:
        """Standard output of one of Slurm's commands."""
        answer = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        return answer.stdout

    def close(self) -> None:
        """Cancel all jobs and end all services."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.ask("scancel", "--user", getpass.getuser())
            deadline = time.monotonic() + 20
            while self.ask("squeue", "--noheader") and time.monotonic() < deadline:
                time.sleep(0.5)
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _spawn(self, program: str, *arguments: str) -> None:
        found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
        assert found is not None, f"{program} is not installed; .ci/run installs it"
        with (self.folder / f"{program}{len(self._processes)}.out").open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    [found, *arguments],
                    env=self.environment,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=processes.die_with_parent,  # a test session that is killed leaves no services
                )
            )

    def _wait_for(self, condition: object) -> None:
        assert callable(condition)
        deadline = time.monotonic() + _STARTED_S
        while not condition():
            assert time.monotonic() < deadline, [path.read_text()[-800:] for path in self.folder.glob("*.out")]
            time.sleep(0.3)
