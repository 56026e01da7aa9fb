"""Translates the place of a process in a job of other launchers than torchrun into torch's variables: RANK, WORLD_SIZE,
LOCAL_RANK, the address of the store, and the node.

    launcher    rank                    address of rank 0                           port
    srun        SLURM_PROCID            SLURM's address of the step's first node    by job and step
                                        loopback if it is the only one
    mpirun      OMPI_COMM_WORLD_RANK    loopback if all ranks are on one node       by job

Any torch variable that is set takes precedence. A step or job of one task is not joined: its ranks are started as
usual. With several tasks the port is between FIRST_PORT and FIRST_PORT + PORTS; MASTER_PORT overrides it.

The command in a job of a Hydra launcher knows that launcher's name, and the file to which it appends its rows, by two
variables of our own.
"""

from __future__ import annotations

import json
import os
import subprocess
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

FIRST_PORT, PORTS = 20_000, 10_000
"""Ports below Linux's ephemeral ports, which begin at 32,768."""

LOOPBACK = "127.0.0.1"

Ask = Callable[..., str]
"""Runs a command and returns its output. Raises OSError or subprocess.SubprocessError."""


def ask(*command: str) -> str:
    """Runs a command for at most ten seconds and returns its output."""
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout


@dataclass(frozen=True)
class Launcher:
    """Environment variables in which a launcher passes a process its place; `job`: variables that identify the job."""

    name: str
    rank: str
    size: str
    local_rank: str
    node: str
    job: tuple[str, ...]
    address: Callable[[Mapping[str, str], Ask], str]

    def describes(self, environment: Mapping[str, str]) -> bool:
        size = environment.get(self.size, "")
        return bool(environment.get(self.rank)) and size.isdecimal() and int(size) > 1

    def in_words_of_torch(self, environment: Mapping[str, str], ask: Ask) -> dict[str, str]:
        """Returns torch's variables, without MASTER_ADDR if the launcher does not provide it."""
        job = "/".join(environment.get(name, "") for name in self.job)
        port = FIRST_PORT + zlib.crc32(job.encode()) % PORTS
        places = {"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local_rank}
        values = {name: environment.get(variable, "") for name, variable in places.items()}
        address = environment.get("MASTER_ADDR") or self.address(environment, ask)
        return {
            name: value for name, value in {**values, "MASTER_ADDR": address, "MASTER_PORT": str(port)}.items() if value
        }


def of_slurm(environment: Mapping[str, str], ask: Ask) -> str:
    """Returns SLURM's address of the step's first node, or the node's name; loopback if it is the only node."""
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        return LOOPBACK
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    try:
        first = ask("scontrol", "show", "hostnames", nodes).split()[0]
        told = dict(word.split("=", 1) for word in ask("scontrol", "show", "node", first).split() if "=" in word)
    except (OSError, subprocess.SubprocessError, IndexError):
        return "" if "[" in nodes else nodes.split(",")[0]
    return told.get("NodeAddr", first)


def of_open_mpi(environment: Mapping[str, str], ask: Ask) -> str:
    """Returns the loopback address if all ranks are on one node, else "": Open MPI provides no other address."""
    size = environment.get("OMPI_COMM_WORLD_SIZE")
    return LOOPBACK if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size else ""


LAUNCHERS = (
    Launcher(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURMD_NODENAME",
        ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"), of_slurm,
    ),
    Launcher(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_HOSTNAME",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"), of_open_mpi,
    ),
)  # fmt: skip


def launcher_of(environment: Mapping[str, str]) -> Launcher | None:
    """Returns the launcher whose variables describe this process; None if there is none."""
    return next((launcher for launcher in LAUNCHERS if launcher.describes(environment)), None)


LOCAL = "local"

LAUNCHER, ROWS = "ZEROBENCH_LAUNCHER", "ZEROBENCH_ROWS"
"""Environment variables of the command in a job: the Hydra launcher, and the file for its rows (sweep/jobs.py)."""


def launcher() -> str:
    """Returns the launcher of this process's sweep: LOCAL, our own, or the Hydra plugin whose job this is."""
    return os.environ.get(LAUNCHER, LOCAL)


def report_row(row: Mapping[str, Any]) -> None:
    """Appends a finished row to the file that the sweep of this job reads, if this is a job. A launcher that interrupts
    a job may start it again, so such a row does not count. Nobody reads it if that sweep was killed, whose folder goes.
    """
    if (path := os.environ.get(ROWS)) and row["status"] != "interrupted":
        with suppress(FileNotFoundError), open(path, "a") as file:
            file.write(json.dumps(dict(row)) + "\n")
