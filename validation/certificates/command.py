"""What certificates say of honest training loops and of planted failures: how many honest loops are accused, and how
many failures are named, with and without a reference.

Loops of one process run in one process, and loops of two ranks in two, over gloo; each in a process group of its own.
A loop that ends with an exception is a row like the others. All values come from one seed, which is drawn for each
call. Nothing is timed, and a busy machine changes no row. Exit code 1: an honest loop is accused or has no certificate,
or a row about a planted failure says `same`.

    python -m validation certificates                         all loops, to results/certificates
    python -m validation certificates --only "*lora*"         these loops, on standard output
"""

from __future__ import annotations

import argparse
import gc
import re
import secrets
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
import torch.distributed as dist

from zerobench.host.environment import rank_environment
from zerobench.host.terminal import progress_bar
from zerobench.ranks.start_ranks import LaunchError, launch
from zerobench.records import CertificateRow
from zerobench.watching import WatchError
from zerobench.watching.held_tensors import leave_out

from ..store import write
from .honest import HONEST
from .loops import Job, Loop, Plant
from .planted import PLANTED

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


def judged(
    loop: str, ranks: int, reference: str, rows: Sequence[CertificateRow], seed: int, plant: Plant | None
) -> CertificateOfLoop:
    """Returns the class of a certificate. `plant`: the planted failure; None for an honest loop."""
    text = lambda row: f"{row.check}: {row.subject}: {row.found}; expected {row.expected or 'nothing'}: {row.why}"  # noqa: E731
    accusing = [row for row in rows if row.verdict in ACCUSING]
    named_by, wrong, number = "", "", Counter(row.verdict for row in rows)
    if plant is None:
        kind = "accused" if number["different"] else "unusual" if number["unusual"] else "clean"
    else:
        about = [row for row in rows if re.search(plant.about, f"{row.check}: {row.subject}")]
        named_by = min((row.verdict for row in accusing if re.search(plant.causes, text(row))), default="")
        wrong = SEPARATOR.join(text(row) for row in about if row.verdict == "same")
        kind = "cannot be told" if any(row.verdict == "cannot be told" for row in about) else "missed"
        if accusing:
            kind = "named" if named_by else "misnamed"
    shown = SEPARATOR.join(f"{row.verdict}: {text(row)}" for row in accusing)
    return CertificateOfLoop(
        loop, ranks, reference, kind, named_by, wrong, number["same"], number["different"], number["unusual"],
        number["cannot be told"], shown, seed,
    )  # fmt: skip


LOOPS: dict[str, Loop] = HONEST | PLANTED
RESULTS = Path("results/certificates")
TIMEOUT_S, MEETING_S = 3600, 60
"""Limits of all loops of one launch, and of a collective."""


@dataclass(frozen=True)
class Work:
    """One run of a loop. `reference`: the name of the loop that it is compared with, if any."""

    name: str
    reference: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names of loops; nothing is written")
    parser.add_argument("--seed", type=int, help="default: drawn")


def run(chosen: argparse.Namespace) -> int:
    """Runs all loops, writes the tables and prints the summary."""
    seed = secrets.randbelow(10_000) if chosen.seed is None else chosen.seed
    rows = run_all(chosen.only or ["*"], seed)
    for row in rows:
        if chosen.only or row.kind in ("accused", "refused", "crashed", "missed", "misnamed") or row.wrongly_same:
            head = f"{row.kind:<15}{row.loop}" + (f", beside {row.reference}" if row.reference else "")
            wrong = [f"same, wrongly: {text}" for text in row.wrongly_same.split(SEPARATOR) if text]
            print("\n                 ".join([head, *row.rows.split(SEPARATOR), *wrong]))
    sides = {
        "honest": [row for row in rows if row.loop in HONEST],
        "planted": [row for row in rows if row.loop in PLANTED],
    }
    counts = [
        counted(f"{name}, {words} a reference", [row for row in side if bool(row.reference) is has_reference])
        for name, side in sides.items()
        for has_reference, words in ((False, "without"), (True, "with"))
    ]
    print(*counts, sep="\n")
    if not chosen.only:
        for name, side in sides.items():
            write(RESULTS / f"{name}.csv", CertificateOfLoop, side)
        write(RESULTS / "summary.csv", CertificateCount, counts)
    is_as_it_should_be = all(row.kind in ("clean", "unusual") for row in sides["honest"])
    return int(not is_as_it_should_be or any(row.wrongly_same for row in sides["planted"]))


def counted(kind: str, rows: Sequence[CertificateOfLoop]) -> CertificateCount:
    number = Counter(row.named_by if row.kind == "named" else row.kind for row in rows)
    return CertificateCount(
        kind, len(rows), number["clean"], number["unusual"], number["different"] + number["accused"],
        number["misnamed"], number["cannot be told"], number["missed"], number["refused"] + number["crashed"],
        sum(bool(row.wrongly_same) for row in rows),
    )  # fmt: skip


def run_all(patterns: Sequence[str], seed: int) -> list[CertificateOfLoop]:
    """Runs the loops whose names match a pattern, with and without references, and returns their rows."""
    named = {name: loop.reference for name, loop in LOOPS.items() if any(fnmatch(name, one) for one in patterns)}
    wanted = [Work(name, reference) for name, its in named.items() for reference in dict.fromkeys(("", its))]
    work = list(dict.fromkeys([*(Work(name) for name in sorted({*named.values()} - {""})), *wanted]))
    rows: dict[Work, CertificateOfLoop] = {}
    with tempfile.TemporaryDirectory() as folder, progress_bar("certificates", len(work), "loops") as advance:

        def heard(row: CertificateOfLoop) -> None:
            advance()
            rows[Work(row.loop, row.reference)] = row

        for ranks in (1, 2):
            if not (of_ranks := [one for one in work if LOOPS[one.name].ranks == ranks]):
                continue
            jobs = [(of_ranks, rank, ranks, folder, seed) for rank in range(ranks)]
            try:
                launch(_of_rank, jobs, Path(folder) / f"logs-{ranks}", TIMEOUT_S, heard)
            except LaunchError as error:
                logs = "\n".join(log.read_text()[-3000:] for log in sorted(Path(folder).glob(f"logs-{ranks}/*.log")))
                raise ValueError(f"{error}\n{logs}") from error
    return [rows[one] for one in work if one in wanted]


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
    loop, references = LOOPS[work.name], folder / "references"
    plant = loop if isinstance(loop, Plant) else None
    to = references / work.name if ranks == 1 and not work.reference and plant is None else None
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
        kind = "refused" if isinstance(error, WatchError) or str(error).startswith("watch") else "crashed"
        shown = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        return CertificateOfLoop(work.name, ranks, work.reference, kind, "", "", 0, 0, 0, 0, shown, seed)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
    return judged(work.name, ranks, work.reference, job.certificate.rows if job.certificate else [], seed, plant)
