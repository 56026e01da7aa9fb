"""A real SLURM on this machine, for as long as a test needs it: munged, slurmctld, and a slurmd per node.

All its files, sockets and ports are its own, so that several can be up at once; a node is a slurmd with a name.
Debian has what it needs: apt-get install slurm-wlm munge.

    step      a slurmstepd, a daemon of its own that outlives its slurmd, and the processes below it
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from getpass import getuser
from pathlib import Path

import psutil

from tests.ranks import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "scontrol", "sinfo")

CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=3
MinJobAge=86400
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PropagateResourceLimits=NONE
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Returns why no SLURM can be started here; empty where it can."""
    absent = [name for name in PROGRAMS if program(name) is None]
    if absent:
        return f"{absent[0]} is not installed: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmd starts steps as root only"


def program(name: str) -> str | None:
    """Returns the path of a program, in the folders of daemons too."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


@dataclass
class Slurm:
    """A running SLURM."""

    folder: Path
    names: Sequence[str] = ("n1", "n2")
    cpus: int = 4
    _daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a user's shell: without a job's variables, with this SLURM's configuration."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "PMI"))}
        return mine | {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def start(self, within_s: float = 60.0) -> None:
        """Starts all daemons and waits until every node is idle. Raises RuntimeError where one is not in time."""
        (self.folder / "state").mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self._run("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
                  f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/munge.log",
                  f"--seed-file={self.folder}/munge.seed")  # fmt: skip
        self._write_configuration()
        self._wait(lambda: (self.folder / "munge.socket").exists(), within_s, "munged")
        self._run("slurmctld", "-D", "-c")
        for name in self.names:
            (self.folder / f"spool-{name}").mkdir(exist_ok=True)
            self._run("slurmd", "-D", "-N", name)
        self._wait(lambda: self._idle() == len(self.names), within_s, "SLURM")

    def steps(self) -> list[psutil.Process]:
        """Returns the processes of all steps of this SLURM."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended
                if " ".join(process.cmdline()).startswith("slurmstepd:") and any(
                    file.path.startswith(f"{self.folder}/slurmd-") for file in process.open_files()
                ):
                    found += [process, *process.children(recursive=True)]
        return found

    def stop(self) -> None:
        """Ends all daemons, and what jobs have left."""
        steps = self.steps()
        for one in reversed(self._daemons):
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGTERM)
        for one in reversed(self._daemons):
            try:
                one.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()
        for process in [*steps, *self.steps()]:  # parents before children
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [program(name) or name, *arguments]
        with (self.folder / f"{name}-{len(self._daemons)}.out").open("wb") as log:
            started = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, start_new_session=True)
        self._daemons.append(started)
        return started

    def _write_configuration(self) -> None:
        node = "NodeName={} NodeHostname=localhost NodeAddr=127.0.0.1 Port={} CPUs={} State=UNKNOWN"
        nodes = "\n".join(node.format(name, free_port(), self.cpus) for name in self.names)
        words = {"port": free_port(), "user": getuser(), "folder": self.folder, "nodes": nodes}
        (self.folder / "slurm.conf").write_text(CONF.format(**words, names=",".join(self.names)))

    def _idle(self) -> int:
        told = subprocess.run(
            ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], env=self.environment, capture_output=True, text=True
        )
        return len(set(told.stdout.split()))  # a line per partition

    def _wait(self, ready: Callable[[], object], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not ready():
            if time.monotonic() > deadline:
                logs = "\n".join(one.read_text(errors="replace")[-800:] for one in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"{what} is not ready after {within_s:.0f} s\n{logs}")
            time.sleep(0.2)
