"""`python -m tests.fuzz`: runs the cases of a seed, a table of what they did, and a line to repeat each finding."""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from zerobench.results.provenance import commit_of, source_hash
from zerobench.sizes import printable

from . import watch
from .commands import command
from .files import READERS
from .run import CONFIG, FILE, Ended, Journal, run, run_case

HELP = """\
Draws command lines (with config folders) and damaged files by a seed, and holds zerobench against them.

A command line makes cells or is refused in sentences that name a word of it; a file is read, left out with a warning,
or refused in a sentence with its name. Nothing else is raised, written, imported, executed or left changed, and nothing
hangs. A cell without a problem survives a file, and a part of them is executed on fake tensors.
"""
EXAMPLES = """\
examples:
  python -m tests.fuzz                                    10,000 command lines and all files; goes on where it was
  python -m tests.fuzz --seed 2 --configs 500 --files 0   others, fewer
  python -m tests.fuzz --seed 1 --only config:17 file:3   these again, with what they are

exit code: 0 no finding, 1 a finding, 2 a wrong command
"""
RECORD = "fuzz.csv"


@dataclass(frozen=True)
class Count:
    """A row of the record: cases of a seed by how they were drawn. `commit`: of the code, "" where it is changed."""

    seed: int
    kind: str
    drawn: str
    cases: int
    refused: int
    cells: int
    sound: int
    executed: int
    findings: int
    cpu_s: float
    commit: str
    date: str


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz", description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the cases (1)")
    parser.add_argument("--configs", type=int, default=10_000, metavar="N", help="command lines (10000)")
    files = 100 * len(READERS)
    parser.add_argument(
        "--files", type=int, default=files, metavar="N", help=f"damaged files ({files}: 100 per reader)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes at once")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases alone, here: config:17 or file:3")
    parser.add_argument(
        "--journal", type=Path, default=Path("results/runs/fuzz"), metavar="FOLDER", help="of what has ended, by code"
    )
    parser.add_argument("--out", type=Path, default=Path("results/fuzz"), metavar="FOLDER", help="the record")
    parser.add_argument("--readers", action="store_true", help="name every reader of files, and end")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    options, console = parsed(arguments), Console(highlight=False)
    if options.readers:
        for name, reader in READERS.items():
            console.print(f"{name}: {reader.read.__name__.strip('_')}", markup=False)
        return 0
    if options.only:
        return again(options.seed, options.only, console)
    journal = Journal(options.journal / source_hash("gpt"), options.seed)
    counts = {CONFIG: options.configs, FILE: options.files}
    left = sum(len(journal.left(kind, count)) for kind, count in counts.items())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(
            f"fuzz, seed {options.seed}", total=sum(counts.values()), completed=sum(counts.values()) - left
        )

        def heard(ended: Ended) -> None:
            progress.advance(task)
            for finding in ended.findings:
                told(progress.console, options.seed, ended.name, finding)

        run(options.seed, counts, journal, options.jobs, heard)
    ended = [one for kind, count in counts.items() for n in range(count) if (one := journal.ended[f"{kind}:{n}"])]
    rows = counted(options.seed, ended)
    record(options.out / RECORD, rows)
    summary(rows, console)
    for one in ended:
        for finding in one.findings:
            told(console, options.seed, one.name, finding)
    return 1 if any(one.findings for one in ended) else 0


def told(console: Console, seed: int, name: str, finding: str) -> None:
    """Prints a finding, and the line that repeats it."""
    console.print(f"{name}: {printable(finding)}", markup=False, soft_wrap=True)
    console.print(f"    python -m tests.fuzz --seed {seed} --only {name}", markup=False)


def again(seed: int, names: Sequence[str], console: Console) -> int:
    """Runs cases in this process, and prints what they are."""
    found = 0
    with tempfile.TemporaryDirectory(prefix="zerobench-fuzz-") as place:
        room = Path(place) / "room"
        watch.begin(room)
        for name in names:
            kind, _, number = name.partition(":")
            if kind not in (CONFIG, FILE) or not number.isdigit():
                console.print(f"--only {name}: name a case, as config:17 or file:3", markup=False)
                return 2
            if kind == CONFIG:
                drawn = command(seed, int(number))
                console.print("zerobench", *map(repr, drawn.words), markup=False, soft_wrap=True)
                for path, content in drawn.files.items():
                    console.print(f"{path}: {printable(content)}", markup=False, soft_wrap=True)
            ended = run_case(seed, kind, int(number), room)
            console.print(f"{name}: {ended.drawn}: {ended.outcome}, {len(ended.findings)} findings", markup=False)
            for finding in ended.findings:
                console.print(f"    {printable(finding)}", markup=False, soft_wrap=True)
            found += len(ended.findings)
    return 1 if found else 0


def counted(seed: int, ended: Sequence[Ended]) -> list[Count]:
    """Returns the rows of the record: command lines by how they were drawn, files by reader."""
    commit, date = commit_of(Path(__file__).parent) or "", datetime.now(UTC).date().isoformat()
    rows = []
    for kind, drawn in dict.fromkeys((one.name.partition(":")[0], one.drawn) for one in ended):
        mine = [one for one in ended if one.name.startswith(f"{kind}:") and one.drawn == drawn]
        rows.append(Count(
            seed, kind, drawn, len(mine), sum(one.outcome == "refused" for one in mine), sum(one.cells for one in mine),
            sum(one.sound for one in mine), sum(one.executed for one in mine), sum(bool(one.findings) for one in mine),
            round(sum(one.seconds for one in mine), 1), commit, date,
        ))  # fmt: skip
    return rows


def record(path: Path, rows: Sequence[Count]) -> None:
    """Replaces the rows of this seed; other seeds' stay."""
    names = [one.name for one in fields(Count)]
    before = []
    if path.is_file():
        with path.open(newline="") as file:
            before = [row for row in csv.DictReader(file) if row["seed"] != str(rows[0].seed)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, names, lineterminator="\n")
        out.writeheader()
        out.writerows([*before, *map(asdict, rows)])


def summary(rows: Sequence[Count], console: Console) -> None:
    """Prints the table."""
    table = Table(
        "cases of", "drawn", *(name for name in ("cases", "refused", "cells", "sound", "executed", "findings", "s"))
    )
    for row in rows:
        numbers = (row.cases, row.refused, row.cells, row.sound, row.executed, row.findings, f"{row.cpu_s:.0f}")
        table.add_row(row.kind, row.drawn, *map(str, numbers))
    console.print(table)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
