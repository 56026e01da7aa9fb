"""What certificates say of honest training loops and of planted failures: how many honest loops are accused, and how
many failures are named, with and without a reference.

Loops of one process run in one process, and loops of two ranks in two, over gloo; each in a process group of its own.
A loop that ends with an exception is a row like the others. All values come from one seed, which is drawn for each
call. Nothing is timed, and a busy machine changes no row. Exit code 1: an honest loop is accused or has no certificate,
or a row about a planted failure says `same`.

    python -m validation certificates                         all loops, to results/certificates
    python -m validation certificates --only "*lora*"         these loops, on standard output; by name, or by a
                                                              line of the list, such as "planted 2 *"
    python -m validation certificates --list                  names alone
"""

from __future__ import annotations

import argparse
import gc
import os
import secrets
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerobench.host.environment import rank_environment
from zerobench.host.terminal import progress_bar
from zerobench.launch.start_ranks import launch
from zerobench.watching.held_tensors import leave_out

from ..store import write
from .judged import SEPARATOR, CertificateCount, CertificateOfLoop, counted, failed, judged
from .loops import Job, Loop, Plant

RESULTS = Path("results/certificates")
TIMEOUT_S, MEETING_S = 3600, 60
"""Limits of all loops of one launch, and of a collective."""


@dataclass(frozen=True)
class Work:
    """One run of a loop. `reference`: the name of the loop that it is compared with, if any."""

    name: str
    reference: str = ""

    @property
    def loop(self) -> Loop:
        """The loop."""
        return loops()[self.name]


def loops() -> dict[str, Loop]:
    """Returns all loops, the honest ones first."""
    from . import honest, honest_ranks, planted, planted_ranks  # they load what trains

    return honest.HONEST | honest_ranks.HONEST | planted.PLANTED | planted_ranks.PLANTED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names of loops; nothing is written")
    parser.add_argument("--seed", type=int, help="default: drawn")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--list", action="store_true", help="print the names of all loops")


def run(chosen: argparse.Namespace) -> int:
    """Runs all loops, writes the tables and prints the summary."""
    if chosen.list:
        print("\n".join(starmap(_listed, loops().items())))
        return 0
    seed = secrets.randbelow(10_000) if chosen.seed is None else chosen.seed
    rows = run_all(chosen.only or ["*"], seed)
    for row in rows:
        if chosen.only or row.kind in ("accused", "refused", "crashed", "missed", "misnamed") or row.wrongly_same:
            print(_shown(row))
    planted = {name for name, loop in loops().items() if isinstance(loop, Plant)}
    sides = [[row for row in rows if (row.loop in planted) is is_planted] for is_planted in (False, True)]
    counts = summary(*sides)
    print(*(f"{one}\n" for one in counts), sep="")
    if not chosen.only:
        for name, side in zip(("honest", "planted"), sides, strict=True):
            write(chosen.out / f"{name}.csv", CertificateOfLoop, side)
        write(chosen.out / "summary.csv", CertificateCount, counts)
    is_as_it_should_be = all(row.kind in ("clean", "unusual") for row in sides[0])
    return int(not is_as_it_should_be or any(row.wrongly_same for row in sides[1]))


def summary(honest: Sequence[CertificateOfLoop], planted: Sequence[CertificateOfLoop]) -> list[CertificateCount]:
    """Returns the counts, with and without references."""
    return [
        counted(f"{kind}, {words} a reference", [row for row in rows if bool(row.reference) is has])
        for kind, rows in (("honest", honest), ("planted", planted))
        for has, words in ((False, "without"), (True, "with"))
    ]


def run_all(patterns: Sequence[str], seed: int) -> list[CertificateOfLoop]:
    """Runs the loops whose names match a pattern, with and without references, and returns their rows."""
    named = {
        name: loop
        for name, loop in loops().items()
        if any(fnmatch(name, pattern) or fnmatch(_listed(name, loop), pattern) for pattern in patterns)
    }
    needed = {loop.reference for loop in named.values() if loop.reference}
    work = [Work(name, reference) for name, loop in named.items() for reference in dict.fromkeys(("", loop.reference))]
    first = [Work(name) for name in sorted(needed)]
    wanted, rows = set(work), list[CertificateOfLoop]()
    work = [*first, *(one for one in work if one not in first)]
    with tempfile.TemporaryDirectory() as folder, progress_bar("certificates", len(work), "loops") as advance:

        def heard(row: CertificateOfLoop) -> None:
            advance()
            rows.append(row)

        for ranks in (1, 2):
            of_ranks = [one for one in work if one.loop.ranks == ranks]
            if not of_ranks:
                continue
            jobs = [(of_ranks, rank, ranks, folder, seed) for rank in range(ranks)]
            outcome = launch(_of_rank, jobs, Path(folder) / f"logs-{ranks}", TIMEOUT_S, heard)
            if outcome.status != "ok":
                logs = "\n".join(log.read_text()[-3000:] for log in sorted(Path(folder).glob(f"logs-{ranks}/*.log")))
                raise ValueError(f"{outcome.status}: {outcome.reason}\n{logs}")
    order = {one: number for number, one in enumerate(work)}
    chosen = [row for row in rows if Work(row.loop, row.reference) in wanted]
    return sorted(chosen, key=lambda row: order[Work(row.loop, row.reference)])


def _of_rank(job: tuple[Sequence[Work], int, int, str, int], tell: Callable[[CertificateOfLoop], None]) -> None:
    work, rank, ranks, folder, seed = job
    torch.set_num_threads(1)
    for number, one in enumerate(work):
        row = run_one(one, seed, Path(folder), rank, ranks, f"{folder}/meeting-{number}" if ranks > 1 else None)
        if rank == 0:
            tell(row)


def run_one(
    work: Work, seed: int, folder: Path, rank: int = 0, ranks: int = 1, rendezvous: str | None = None
) -> CertificateOfLoop:
    """Runs a loop on this rank and returns its row, which is complete on rank 0."""
    loop, references = work.loop, folder / "references"
    is_kept = ranks == 1 and not work.reference and not isinstance(loop, Plant)
    to = references / work.name if is_kept else None
    job = Job(seed, rank, ranks, loop.expected, references / work.reference if work.reference else None, to)
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if rendezvous is not None:
                stack.enter_context(rank_environment(rank, ranks, "cpu", "gloo", rendezvous, 1, MEETING_S))
            stack.enter_context(leave_out())
            loop.function(job)
        if rank == 0 and job.certificate is None:
            raise ValueError("the loop made no certificate")
    except Exception as error:
        traceback.print_exc()
        return failed(work.name, ranks, work.reference, error, seed)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
    rows = job.certificate.rows if job.certificate is not None else []
    return judged(work.name, ranks, work.reference, rows, seed, loop if isinstance(loop, Plant) else None)


def _listed(name: str, loop: Loop) -> str:
    return f"{'planted' if isinstance(loop, Plant) else 'honest'} {loop.ranks} {name}"


def _shown(row: CertificateOfLoop) -> str:
    head = f"{row.kind:<15}{row.loop}" + (f", beside {row.reference}" if row.reference else "")
    lines: Iterable[Any] = [head, *row.rows.split(SEPARATOR)]
    lines = [*lines, *(f"same, wrongly: {one}" for one in row.wrongly_same.split(SEPARATOR) if one)]
    return f"{os.linesep}                 ".join(lines)
