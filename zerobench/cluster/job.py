"""A job that somebody else has started: torchrun, srun, mpirun. One process a rank; they meet in the job's store.

job       what the environment says of this process
seat      what a process says of itself as it comes: its machine, its GPUs, its code
roster    all seats; where ranks run, and on how many machines and GPUs, follows from it
team      this process among the others: the job, its board, its pulse. Rank 0 alone has the roster
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from .serialize import plain, rebuild
from .store import JOIN_S, Board, Listener, LostError, Pulse

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LAST_PORT = 2**16 - 1
TELLING = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Any of these says that there is a job; the address alone does not."""


class JobError(Exception):
    """There is a job, but it cannot be joined; the message is the sentence."""


@dataclass(frozen=True)
class Job:
    """`local_rank`: among the ranks of this machine. `agent`: torchrun keeps the store; else rank 0's process does.
    `attempt`: tells torchrun's restarts apart. `machine`: the host, and which of torchrun's agents on it.
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    agent: bool
    attempt: str
    machine: str

    @property
    def launched_by(self) -> str:
        """Who started the processes, as far as the environment tells."""
        return "torchrun" if self.attempt else "the environment"


def find_job(environment: Mapping[str, str]) -> Job | None:
    """The job that the environment describes, or None. Raises JobError for half a description, or a wrong one."""
    given = [name for name in TELLING if environment.get(name)]
    if not given:
        return None
    for name in NEEDED:
        if not environment.get(name):
            words = f"a job's process needs {', '.join(NEEDED)}; to join none, unset {' and '.join(given)}"
            raise JobError(f"{name} is not set and {given[0]} is: {words}")
    for name in NUMBERS:
        if not environment[name].isdecimal():
            raise JobError(f"{name}={environment[name]}: must be a whole number from 0 on")
    rank, world_size, local_rank, port = (int(environment[name]) for name in NUMBERS)
    if not 1 <= port <= LAST_PORT:
        raise JobError(f"MASTER_PORT={port}: must be a port, 1 to {LAST_PORT}")
    for name, value, limit in (("RANK", rank, world_size), ("LOCAL_RANK", local_rank, world_size)):
        if value >= limit:
            raise JobError(f"{name}={value}: must be below WORLD_SIZE={world_size}")
    group = environment.get("GROUP_RANK")
    return Job(
        rank,
        world_size,
        local_rank,
        environment["MASTER_ADDR"],
        port,
        agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt="/".join(environment.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")).strip(
            "/"
        ),
        machine=socket.gethostname() + (f"/{group}" if group else ""),
    )


@dataclass(frozen=True)
class Seat:
    """`gpus`: the identities of those that this process sees. `code`, `torch`: what it runs."""

    rank: int
    world_size: int
    local_rank: int
    machine: str
    gpus: tuple[str, ...]
    code: str
    torch: str

    @property
    def host(self) -> str:
        """The machine, whichever of torchrun's agents on it this is."""
        return self.machine.split("/")[0]

    @property
    def gpu(self) -> str | None:
        """The GPU that this rank works on, as rank_environment chooses it; None where it sees none."""
        return self.gpus[self.local_rank % len(self.gpus)] if self.gpus else None


@dataclass(frozen=True)
class Roster:
    """The seats of all ranks, in their order."""

    seats: tuple[Seat, ...]

    def machines(self, ranks: int) -> int:
        """How many machines the first `ranks` ranks are on; each of torchrun's agents counts as one."""
        return len({seat.machine for seat in self._first(ranks)})

    def crowd(self, ranks: int) -> int:
        """The first `ranks` ranks: the most of them on one host."""
        return max(Counter(seat.host for seat in self._first(ranks)).values())

    def ranks_per_gpu(self, ranks: int) -> int:
        """The first `ranks` ranks: the most of them on one GPU; 0 where one of them sees no GPU."""
        first = self._first(ranks)
        return max(Counter((seat.host, seat.gpu) for seat in first).values()) if all(s.gpus for s in first) else 0

    def _first(self, ranks: int) -> tuple[Seat, ...]:
        return self.seats[: max(1, ranks)]

    def check(self) -> None:
        """Raises JobError where seats contradict one another."""
        first = self.seats[0]
        places: dict[tuple[str, int], int] = {}
        for seat in self.seats:
            for name in ("world_size", "code", "torch"):
                mine, theirs = getattr(first, name), getattr(seat, name)
                if mine != theirs:
                    raise JobError(f"rank {seat.rank} of the job has {name} {theirs} and rank 0 has {mine}")
            other = places.setdefault((seat.machine, seat.local_rank), seat.rank)
            if other != seat.rank:
                where = f"ranks {other} and {seat.rank} on {seat.machine} both have LOCAL_RANK={seat.local_rank}"
                raise JobError(f"{where}: number the ranks of a machine from 0 on")


class Team:
    """This process among those of its job. `passes`: how many rank 0 has published."""

    def __init__(self, job: Job, code: str) -> None:
        self.job = job
        where = job.address, job.port
        self.prefix = f"zerobench/{job.attempt}"
        self.board = Board(*where, self.prefix, host=job.rank == 0 and not job.agent)
        if self.board.raise_by(f"came/{job.rank}", 1) > 1:
            words = f"another process of the job at {self.board.address} has that rank, or an earlier command of it had"
            raise JobError(f"RANK={job.rank}: {words}; number the ranks from 0 on, and start a job for each command")
        self.board.post(f"seat/{job.rank}", plain(_take_seat(job, code)))
        self.listener = Listener(self.board)
        self.pulse = Pulse(Board(*where, self.prefix), job.rank)
        self.passes = 0

    @cached_property
    def roster(self) -> Roster:
        """Waits until all have come. Raises JobError where one does not."""
        deadline, seats = time.monotonic() + JOIN_S, []
        for rank in range(self.job.world_size):
            while (found := self.board.read(f"seat/{rank}")) is None:
                if time.monotonic() > deadline:
                    raise JobError(f"rank {rank} of the job did not come within {JOIN_S:.0f} s")
                time.sleep(0.1)
            seats.append(rebuild(Seat, found))
        return Roster(tuple(seats))

    def leave(self, reason: str) -> None:
        """Says why this process will not take part any more."""
        self.board.post(f"left/{self.job.rank}", reason)

    def why_absent(self, rank: int) -> str | None:
        """What a rank's process said as it left, or that it is lost; None while it is there."""
        left: str | None = self.board.read(f"left/{rank}")
        return "is lost: its process says nothing" if left is None and self.listener.silent(rank) else left


def too_many(ranks: int, world_size: int) -> str:
    """The sentence for a world that is larger than the job."""
    return f"world_size={ranks}: the job that was joined has {world_size} ranks; start more, or ask for fewer"


def _take_seat(job: Job, code: str) -> Seat:
    import torch

    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    identities = tuple(str(torch.cuda.get_device_properties(number).uuid) for number in gpus)
    return Seat(job.rank, job.world_size, job.local_rank, job.machine, identities, code, torch.__version__)


_teams: list[Team] = []


def gather() -> None:
    """Waits until the whole job is there, where one has been joined. Raises JobError where it does not come."""
    mine = team()
    if mine is not None:
        mine.roster.check()


def machines(ranks: int) -> int:
    """On how many machines the first `ranks` ranks are."""
    mine = team()
    return 1 if mine is None else mine.roster.machines(ranks)


def team() -> Team | None:
    """This process's team, where it has joined a job."""
    return _teams[-1] if _teams else None


@contextmanager
def joined(job: Job, code: str) -> Iterator[Team]:
    """This process is in `job`'s team. Raises JobError where that cannot be."""
    try:
        mine = Team(job, code)
    except LostError as lost:
        raise JobError(str(lost)) from lost
    _teams.append(mine)
    try:
        yield mine
    finally:
        _teams.pop()
        mine.pulse.stop()
