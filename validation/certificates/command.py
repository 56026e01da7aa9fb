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
import re
import secrets
import tempfile
import traceback
import warnings
from collections import Counter
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
from zerobench.ranks.start_ranks import LaunchError, launch
from zerobench.records import CertificateRow
from zerobench.watching import WatchError
from zerobench.watching.held_tensors import leave_out

from ..store import write
from .loops import Job, Loop, Plant

# An honest loop is clean, `unusual` (a row says so) or accused (a row is `different`). A planted failure is
#
# named            a row that is `different` or `unusual` is about its cause
# misnamed         there are such rows, and none of them is
# cannot be told   there is none, and a row about the failure says that it cannot be told
# missed           nothing of these
#
# A run is `wrongly_same` if a row about the planted failure says `same`, whatever other rows say. Loops that end with
# an exception are refused (an error of the watch) or crashed.

ACCUSING = ("different", "unusual")
SEPARATOR = " | "


@dataclass(frozen=True)
class CertificateOfLoop:
    """A run of a loop. `kind`: its class; `named_by`: the verdict of the row that names a planted failure; `rows`: the
    rows that are different or unusual, or the error message.
    """

    loop: str
    ranks: int
    reference: str
    kind: str
    named_by: str
    wrongly_same: str
    same: int
    different: int
    unusual: int
    untold: int
    rows: str
    seed: int


@dataclass(frozen=True)
class CertificateCount:
    """Runs of each class, of one kind of loop."""

    loops: str
    runs: int
    clean: int
    unusual: int
    different: int
    misnamed: int
    untold: int
    missed: int
    failed: int
    wrongly_same: int


def text_of(row: CertificateRow) -> str:
    """Returns a row as one line."""
    return f"{row.check}: {row.subject}: {row.found}; expected {row.expected or 'nothing'}: {row.why}"


def judged(
    loop: str, ranks: int, reference: str, rows: Sequence[CertificateRow], seed: int, plant: Plant | None
) -> CertificateOfLoop:
    """Returns the class of a certificate. `plant`: the planted failure; None for an honest loop."""
    accusing = [row for row in rows if row.verdict in ACCUSING]
    about = [row for row in rows if plant is not None and re.search(plant.about, f"{row.check}: {row.subject}")]
    naming = [row.verdict for row in accusing if plant is not None and re.search(plant.causes, text_of(row))]
    named_by, wrongly = min(naming, default=""), [row for row in about if row.verdict == "same"]
    if plant is None:
        verdicts = {row.verdict for row in accusing}
        kind = "accused" if "different" in verdicts else "unusual" if verdicts else "clean"
    elif accusing:
        kind = "named" if named_by else "misnamed"
    else:
        kind = "cannot be told" if any(row.verdict == "cannot be told" for row in about) else "missed"
    number = Counter(row.verdict for row in rows)
    shown = SEPARATOR.join(f"{row.verdict}: {text_of(row)}" for row in accusing)
    wrong = SEPARATOR.join(map(text_of, wrongly))
    return CertificateOfLoop(
        loop, ranks, reference, kind, named_by, wrong, number["same"], number["different"], number["unusual"],
        number["cannot be told"], shown, seed,
    )  # fmt: skip


def failed(loop: str, ranks: int, reference: str, error: BaseException, seed: int) -> CertificateOfLoop:
    """Returns the row of a loop that ended with an exception."""
    kind = "refused" if isinstance(error, WatchError) or str(error).startswith("watch") else "crashed"
    shown = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return CertificateOfLoop(loop, ranks, reference, kind, "", "", 0, 0, 0, 0, shown, seed)


def counted(kind: str, rows: Iterable[CertificateOfLoop]) -> CertificateCount:
    """Returns the summary of some runs."""
    rows = list(rows)
    number = Counter(row.named_by if row.kind == "named" else row.kind for row in rows)
    return CertificateCount(
        kind, len(rows), number["clean"], number["unusual"], number["different"] + number["accused"],
        number["misnamed"], number["cannot be told"], number["missed"], number["refused"] + number["crashed"],
        sum(bool(row.wrongly_same) for row in rows),
    )  # fmt: skip


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
    from . import honest, planted  # they load what trains

    return honest.HONEST | planted.PLANTED


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
            try:
                launch(_of_rank, jobs, Path(folder) / f"logs-{ranks}", TIMEOUT_S, heard)
            except LaunchError as error:
                logs = "\n".join(log.read_text()[-3000:] for log in sorted(Path(folder).glob(f"logs-{ranks}/*.log")))
                raise ValueError(f"{error}\n{logs}") from error
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
