"""A job started by an external launcher (torchrun, srun, mpirun): one process per rank; they meet in its store.

Job            the environment's description of this process
RankInfo       a process's description of itself when it joins: its machine, GPUs and code
Membership     the infos of some ranks, which determine their placement on machines and GPUs
JobContext     this process within the job: the job, its store, its heartbeat. Only rank 0 reads the membership
lost           said of a rank whose process has left, or whose heartbeat has stopped; permanent, whatever comes later.
               Every later cell that needs the rank is a crash; the same command in a new job runs it
JobLauncher    another launcher than torchrun, whose variables are translated into torch's:

    launcher    rank                    address of rank 0                           port
    srun        SLURM_PROCID            SLURM's address of the step's first node    by job and step
                                        loopback if it is the only one
    mpirun      OMPI_COMM_WORLD_RANK    loopback if all ranks are on one node       by job

Any torch variable that is set takes precedence. A step or job of one task is not joined: its ranks are started as
usual. With several tasks the port is between FIRST_PORT and FIRST_PORT + PORTS; MASTER_PORT overrides it.

The processes exchange dataclasses as plain values in JSON, which are rebuilt by their types (`to_plain`, `rebuild`).
Nothing is unpickled: data from another machine can only become the requested types. Floats keep every bit, since JSON
has the shortest text that parses to the same number.

The command in a job of a Hydra launcher knows that launcher's name, and the file to which it appends its rows, by two
variables of our own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from .store import JOIN_S, Heartbeat, HeartbeatMonitor, JobStore, LostError, attempts, reachable

FIRST_PORT, PORTS = 20_000, 10_000
"""Ports below Linux's ephemeral ports, which begin at 32,768."""

LOOPBACK = "127.0.0.1"

Ask = Callable[..., str]
"""Runs a command and returns its output. Raises OSError or subprocess.SubprocessError."""


def ask(*command: str) -> str:
    """Runs a command for at most ten seconds and returns its output."""
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout


@dataclass(frozen=True)
class JobLauncher:
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
    JobLauncher(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURMD_NODENAME",
        ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"), of_slurm,
    ),
    JobLauncher(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_HOSTNAME",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"), of_open_mpi,
    ),
)  # fmt: skip


LOCAL = "local"

LAUNCHER, ROWS = "ZEROBENCH_LAUNCHER", "ZEROBENCH_ROWS"
"""Environment variables of the command in a job: the Hydra launcher, and the file for its rows (sweep/jobs.py)."""


def launcher() -> str:
    """Returns the launcher of this process's sweep: LOCAL, our own, or the Hydra plugin whose job this is."""
    return os.environ.get(LAUNCHER, LOCAL)


def report_row(row: Mapping[str, Any]) -> None:
    """In a launcher's job, appends a finished row to the file that the job's sweep reads. Interrupted rows are skipped,
    since the launcher may start the job again. If the sweep was killed and its folder is gone, nothing is written.
    """
    if (path := os.environ.get(ROWS)) and row["status"] != "interrupted":
        with suppress(FileNotFoundError), open(path, "a") as file:
            file.write(json.dumps(dict(row)) + "\n")


NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LAST_PORT = 2**16 - 1
TORCHRUN = "torchrun"
TELLING = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Any of these variables indicates a job; the address alone does not."""


class JobError(Exception):
    """Raised if a job exists but cannot be joined, with the message for the user."""


@dataclass(frozen=True)
class Job:
    """The environment's description of a job.

    `local_rank`: among the ranks of this machine. `agent`: torchrun hosts the store; else rank 0's process does.
    `run`: torchrun's name of the job. `machine`: the host, and the node according to the launcher: SLURM's name of the
    node, or the number of torchrun's agent. Hosts in containers may have equal names, and one host may be several
    nodes.
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    agent: bool
    run: str
    machine: str
    launched_by: str = "the environment"


def find_job(environment: Mapping[str, str], ask: Ask = ask) -> Job | None:
    """Reads the job from torch's or a launcher's environment variables; None without a job. Raises JobError for an
    incomplete or invalid description.
    """
    given = [name for name in TELLING if environment.get(name)]
    by = None if given else next((launcher for launcher in LAUNCHERS if launcher.describes(environment)), None)
    if by is not None:
        environment = by.in_words_of_torch(environment, ask) | {k: v for k, v in environment.items() if v}
        given = [by.rank]
    if not given:
        return None
    for name in NEEDED:
        if not environment.get(name):
            needs = f"a job's process needs {', '.join(NEEDED)}; to join none, unset {' and '.join(given)}"
            raise JobError(f"{name} is not set and {given[0]} is: {needs}")
    for name in NUMBERS:
        if not environment[name].isdecimal():
            raise JobError(f"{name}={environment[name]}: must be a whole number from 0 on")
    rank, world_size, local_rank, port = (int(environment[name]) for name in NUMBERS)
    if not 1 <= port <= LAST_PORT:
        raise JobError(f"MASTER_PORT={port}: must be a port, 1 to {LAST_PORT}")
    for name, value, limit in (("RANK", rank, world_size), ("LOCAL_RANK", local_rank, world_size)):
        if value >= limit:
            raise JobError(f"{name}={value}: must be below WORLD_SIZE={world_size}")
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    node = environment.get("GROUP_RANK") or environment.get(by.node if by else "SLURMD_NODENAME")
    return Job(
        rank,
        world_size,
        local_rank,
        environment["MASTER_ADDR"],
        port,
        agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run=run,
        machine=socket.gethostname() + (f"/{node}" if node else ""),
        launched_by=TORCHRUN if run else by.name if by else "the environment",
    )


@dataclass(frozen=True)
class RankInfo:
    """One rank's description. `gpus`: identities of visible GPUs. `code`, `torch`: versions that it runs."""

    rank: int
    world_size: int
    local_rank: int
    machine: str
    gpus: tuple[str, ...]
    code: str
    torch: str

    @property
    def host(self) -> str:
        """The machine without its node."""
        return self.machine.split("/")[0]

    @property
    def gpu(self) -> str | None:
        """The GPU that this rank uses, chosen as in rank_environment; None if no GPU is visible."""
        return self.gpus[self.local_rank % len(self.gpus)] if self.gpus else None


@dataclass(frozen=True)
class Membership:
    """The infos of ranks, in rank order."""

    members: tuple[RankInfo, ...]

    def machines(self, ranks: int) -> int:
        """Returns the number of machines of the first `ranks` ranks; each node of the launcher counts as one."""
        return len({info.machine for info in self._first(ranks)})

    def most_per_host(self, ranks: int) -> int:
        """Returns the maximum number of the first `ranks` ranks on one host."""
        return max(Counter(info.host for info in self._first(ranks)).values())

    def ranks_per_gpu(self, ranks: int) -> int:
        """Returns the maximum number of the first `ranks` ranks on one GPU; 0 if one of these ranks sees no GPU."""
        first = self._first(ranks)
        return max(Counter((info.host, info.gpu) for info in first).values()) if all(s.gpus for s in first) else 0

    def _first(self, ranks: int) -> tuple[RankInfo, ...]:
        return self.members[: max(1, ranks)]

    def check(self) -> None:
        """Raises JobError if members contradict each other."""
        first = self.members[0]
        places: dict[tuple[str, int], int] = {}
        for info in self.members:
            for name in ("world_size", "code", "torch"):
                ours, theirs = getattr(first, name), getattr(info, name)
                if ours != theirs:
                    raise JobError(f"rank {info.rank} of the job has {name} {theirs} and rank 0 has {ours}")
            other = places.setdefault((info.machine, info.local_rank), info.rank)
            if other != info.rank:
                where = f"ranks {other} and {info.rank} on {info.machine} both have LOCAL_RANK={info.local_rank}"
                raise JobError(f"{where}: number the ranks of a machine from 0 on")


class JobContext:
    """This process within its job. `passes`: number of passes that rank 0 has published. `lost`: known lost ranks, each
    with the reason.
    """

    def __init__(self, job: Job, code: str) -> None:
        import torch

        self.job = job
        where = reachable(job.address), job.port
        self.prefix = f"zerobench/{job.run}"
        self.store = JobStore(*where, self.prefix, host=job.rank == 0 and not job.agent)
        if self.store.increment(f"came/{job.rank}") > 1:
            raise JobError(
                f"RANK={job.rank}: another process of the job at {self.store.address} has that rank, or an earlier"
                " command of it had; number the ranks from 0 on, and start a job for each command"
            )
        gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        identities = tuple(str(torch.cuda.get_device_properties(number).uuid) for number in gpus)
        info = RankInfo(job.rank, job.world_size, job.local_rank, job.machine, identities, code, torch.__version__)
        self.store.post(f"info/{job.rank}", to_plain(info))
        self.monitor = HeartbeatMonitor(self.store)
        self.heartbeat = Heartbeat(JobStore(*where, self.prefix), job.rank)
        self.passes = 0
        self.lost: dict[int, str] = {}

    @cached_property
    def membership(self) -> Membership:
        """The infos of all ranks; waits until all have joined. Raises JobError if one does not join."""
        return Membership(tuple(rebuild(RankInfo, info) for info in self.wait_for_all()))

    def wait_for_all(self, patience_s: float = JOIN_S) -> list[Any]:
        """Returns the infos that all ranks post when they join. Raises JobError if one does not join."""
        infos = []
        for rank in range(self.job.world_size):
            for _ in attempts(patience_s, f"rank {rank} of the job has not come to the store at {self.store.address}"):
                if (info := self.store.read(f"info/{rank}")) is not None:
                    infos.append(info)
                    break
            else:
                raise JobError(f"rank {rank} of the job did not come within {patience_s:.0f} s")
        return infos

    def look(self, ranks: Iterable[int] | None = None) -> None:
        """Checks for lost ranks among `ranks`; None: among all other ranks."""
        for rank in range(self.job.world_size) if ranks is None else ranks:
            if rank in self.lost or rank == self.job.rank:
                continue
            if (left := self.store.read(f"left/{rank}")) is not None:
                self.lost[rank] = left
            elif self.monitor.silent(rank):
                self.lost[rank] = "is lost: its process says nothing"

    def leave(self, reason: str) -> None:
        """Publishes the reason why this process leaves."""
        self.store.post(f"left/{self.job.rank}", reason)


def too_many(ranks: int, world_size: int) -> str:
    """Returns an error message for a world that is larger than the job."""
    return f"world_size={ranks}: the job that was joined has {world_size} ranks; start more, or ask for fewer"


_contexts: list[JobContext] = []


def gather() -> None:
    """Waits until all ranks of a joined job are present. Raises JobError if one does not join."""
    context = current_job()
    if context is not None:
        context.membership.check()


def machines(ranks: int) -> int:
    """Returns the number of machines of the first `ranks` ranks."""
    context = current_job()
    return 1 if context is None else context.membership.machines(ranks)


def current_job() -> JobContext | None:
    """Returns this process's job context, or None if it has joined no job."""
    return _contexts[-1] if _contexts else None


@contextmanager
def joined(job: Job, code: str) -> Iterator[JobContext]:
    """Joins `job` for the duration of the context. Raises JobError if that fails."""
    try:
        context = JobContext(job, code)
    except LostError as error:
        raise JobError(str(error)) from error
    _contexts.append(context)
    try:
        yield context
    finally:
        _contexts.pop()
        context.heartbeat.stop()


_types = cache(get_type_hints)


def to_plain(value: Any) -> Any:
    """Converts dataclasses to dicts, including those in lists, tuples and dicts; other values are unchanged. A
    dataclass with its own form provides it as `as_dict` and `from_dict`.
    """
    if is_dataclass(value) and not isinstance(value, type):
        if (own_form := getattr(value, "as_dict", None)) is not None:
            return own_form()
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return {key: to_plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def rebuild(kind: Any, value: Any) -> Any:
    """Rebuilds the value of type `kind` from the result of `to_plain`. Raises ValueError if it does not fit."""
    origin, parts, is_class = get_origin(kind), get_args(kind), is_dataclass(kind)
    if kind is Any:
        return value
    if is_class and hasattr(kind, "from_dict") and isinstance(value, dict):
        try:
            return kind.from_dict(value)
        except TypeError as error:
            raise ValueError(f"{value!r:.60} is no {kind.__name__}: {error}") from error
    if is_class:
        if not isinstance(value, dict) or set(value) != {field.name for field in fields(kind)}:
            raise ValueError(f"{value!r:.60} is no {kind.__name__}")
        types = _types(kind)
        return kind(**{name: rebuild(types[name], item) for name, item in value.items()})
    if origin in (Union, UnionType):
        for part in parts:
            with suppress(ValueError):
                return rebuild(part, value)
    if origin is list and isinstance(value, list):
        return [rebuild(parts[0], item) for item in value]
    if origin is tuple and isinstance(value, list):
        kinds = parts[:1] * len(value) if parts[1:] == (...,) else parts
        return tuple(rebuild(expected, part) for expected, part in zip(kinds, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {key: rebuild(parts[1], item) for key, item in value.items()}
    if type(value) is kind or (kind is type(None) and value is None):
        return value
    if kind is float and type(value) is int:  # a column of type float may hold a whole number
        return value
    raise ValueError(f"{value!r:.60} is no {getattr(kind, '__name__', kind)}")
