"""`zerobench estimate --published FILE --out ERRORS`: reads, compares, writes and sums up."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ....fake_execution import Limits
from ....host.terminal import progress_console, stdout_console
from ....results.grid import Grid
from ....sizes import printable, show_count
from .causes import is_part
from .compare import Tell, compare
from .judge import CLOSE, GIB, Judged
from .rows import read
from .store import Store

COLUMNS = (
    "id", "source", "system", "strategy", "model", "gpus", "seq", "micro_batch", "precision", "act_ckpt", "compile",
    "peak_kind", "published_gib", "status", "estimate_low_gib", "estimate_high_gib", "error_percent", "explanation",
    "assumed", "reason",
)  # fmt: skip
"""Columns of the errors file; those of a run are as in the file that was read."""

LISTED = ("compared", "failed", "no estimate", "no peak")
"""Every status, in the order of the summary."""


def published(path: Path, out: Path, folder: Path, jobs: int | None, limits: Limits) -> int:
    """Compares the runs of `path` and writes `out`. Returns the exit code: 1 where a run could not be executed.

    Raises ValueError, one sentence, for a file that is not of the schema; nothing is written then.
    """
    runs = read(path)
    with _progress() as tell:
        judged = compare(runs, Store(folder), tell, jobs, limits)
    _write(judged, out)
    show(judged, stdout_console())
    print(f"{out}: {show_count(len(judged), 'row')}")
    return int(any(one.status == "failed" for one in judged))


@contextmanager
def _progress() -> Iterator[Tell]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress_console(), transient=True) as progress:
        tasks: dict[str, int] = {}

        def tell(what: str, done: int, whole: int) -> None:
            task = tasks.setdefault(what, len(tasks))
            if task == len(progress.tasks):
                progress.add_task(what, total=whole)
            progress.update(progress.tasks[task].id, completed=done)

        yield tell


def _write(judged: Sequence[Judged], out: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_cells(one) for one in judged)
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    aside.write_text(text.getvalue())
    aside.replace(out)


def _cells(one: Judged) -> list[str]:
    run = one.run
    own = {
        "published_gib": run.peak_mem_gib, "status": one.status, "estimate_low_gib": _gib(one.low_bytes),
        "estimate_high_gib": _gib(one.high_bytes), "explanation": one.explanation, "assumed": one.assumed,
        "error_percent": None if one.error is None else f"{100 * one.error:+.1f}", "reason": one.reason,
    }  # fmt: skip
    return [_text(own[name] if name in own else getattr(run, name)) for name in COLUMNS]


def _gib(size: int | None) -> str | None:
    """Formats GiB in five digits at least, so that small models are not rounded away."""
    return None if size is None else f"{size / GIB:.5g}"


def _text(value: object) -> str:
    return "" if value is None else str(value)


def show(judged: Sequence[Judged], console: Console) -> None:
    """Prints the rows that were compared, what explains errors beyond 5 %, why others have no estimate, and counts."""
    there = [one for one in judged if one.status == "compared"]
    if there:
        header = ["run", "kind", "published GiB", "estimate GiB", "error"]
        console.print(Grid(header, [_line(one) for one in there], left=2))
    said = {one.run.id: one.explanation or one.reason for one in judged if one.status != "no peak"}
    for name, words in said.items():
        if words:
            console.print(printable(f"{name}: {words}"), markup=False, highlight=False, soft_wrap=True)
    counts = Counter(one.status for one in judged)
    console.print(", ".join(f"{counts[name]} {name}" for name in LISTED if counts[name]), highlight=False)
    errors = [abs(one.error) for one in there if one.error is not None]
    if errors:
        explained = sum(bool(one.explanation) and not is_part(one.explanation) for one in there)
        words = f"median |error| {median(errors):.1%}; within {CLOSE:.0%}: {sum(one.close for one in there)} of"
        console.print(f"{words} {len(there)}, {explained} more with a cause that was tried", highlight=False)


def _line(one: Judged) -> list[str]:
    low, high = _gib(one.low_bytes), _gib(one.high_bytes)
    estimate = str(low) if low == high else f"{low} to {high}"
    return [one.run.id, one.run.peak_kind, f"{one.run.peak_mem_gib:g}", estimate, f"{one.error:+.1%}"]
