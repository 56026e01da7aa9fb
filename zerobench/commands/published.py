"""`zerobench published`: figures of the ZeRO literature, each as formula, executed and printed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..config.unknown_keys import nearest
from ..fake_execution import Execution, Target
from ..host.terminal import progress_console, stdout_console
from ..published import SOURCES, Reproduced, Row, reproduce
from ..published.reproduce import Run, here
from ..published.write import FORMATS, HEADER, cells_of, remarks
from ..results.grid import Grid
from ..results.options import Parser, add_columns
from ..sizes import printable, show_count

DESCRIPTION = """\
Lists published figures that this project reproduces: the formula, the value that is executed on fake tensors, and what
is printed; the difference, and whether it is within the printed precision. Misprints are marked with what is right.

An executed value is a slope: two models, one with more layers than the other, are executed, one rank of each, and how
much more the larger holds or moves is divided by how much larger it is. What does not grow with the model is `in
flight`: a bucket, a gathered block, logits. Nothing else is taken off. About two minutes.
"""

EXAMPLES = """\
examples:
  zerobench published                                          all of them
  zerobench published --only megatron,offload                  of these sources
  zerobench published --list                                   formulas beside what is printed; nothing is executed
  zerobench published --out published.csv --out published.md   all columns, and a page; also .json

ZeRO's Table 1, cell by cell: make table1. Exit code: 0 all rows were executed, or --list; 1 one was not; 2 the command
itself was wrong; 130 interrupted.
"""


FIRST_TO_GO = ("in flight", "within", "unit", "formula")

ENDINGS = {".csv": "csv", ".json": "json", ".md": "markdown"}


def published(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: see EXAMPLES."""
    chosen = _parser().parse_args(arguments)
    try:
        rows = _rows(chosen.only)
        files = {out: _format_of(out, chosen.format) for out in chosen.out}
    except ValueError as error:
        print(printable(f"zerobench published: {error}"), file=sys.stderr)
        return 2
    try:
        found = [Reproduced(*row) for row in rows] if chosen.list else _reproduced(rows)
    except KeyboardInterrupt:
        print("zerobench published: stopped; nothing is written", file=sys.stderr)
        return 130
    if not files:
        _print(found, chosen.columns) if chosen.format is None else sys.stdout.write(FORMATS[chosen.format](found))
    for out, form in files.items():
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(FORMATS[form](found))
        print(f"{show_count(len(found), 'row')} in {out}", file=sys.stderr)
    return int(any(one.problem for one in found))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("zerobench published", None, DESCRIPTION, EXAMPLES, formatter_class=raw)
    parser.add_argument("--only", metavar="SOURCE", help=f"of these, comma-separated: {', '.join(SOURCES)}")
    parser.add_argument("--list", action="store_true", help="formulas and printed values alone; nothing is executed")
    parser.add_argument("--format", choices=tuple(FORMATS), help="default: a table for the terminal")
    words = "written there instead, .csv, .json or .md; may be given again"
    parser.add_argument("--out", type=Path, metavar="FILE", action="append", default=[], help=words)
    add_columns(parser, HEADER)
    return parser


def _rows(only: str | None) -> list[tuple[str, Row]]:
    names = list(SOURCES) if only is None else only.split(",")
    for name in names:
        if name not in SOURCES:
            hint = nearest(name, list(SOURCES)) or f"; use {', '.join(SOURCES)}"
            raise ValueError(f"--only {name}: no such source{hint}")
    return [(name, row) for name in dict.fromkeys(names) for row in SOURCES[name].rows]


def _reproduced(rows: Sequence[tuple[str, Row]]) -> list[Reproduced]:
    cells = {(row.target, words) for _, row in rows for words in row.cells}
    with _progress(len(cells)) as run:
        return reproduce(rows, run)


@contextmanager
def _progress(cells: int) -> Iterator[Run]:
    columns = (TextColumn("published"), BarColumn(), MofNCompleteColumn(), TextColumn("cells"), TimeElapsedColumn())
    with Progress(*columns, console=progress_console(), transient=True) as progress:
        task = progress.add_task("", total=cells)

        def run(target: Target, lines: Sequence[str]) -> Iterator[Execution]:
            for one in here(target, lines):
                progress.advance(task)
                yield one

        yield run


def _format_of(out: Path, chosen: str | None) -> str:
    """Returns the format that a file's ending names, or that was chosen. Raises ValueError, a sentence."""
    if out.is_dir():
        raise ValueError(f"--out {out}: is a folder; name a file")
    named = ENDINGS.get(out.suffix, chosen)
    if named is None:
        raise ValueError(f"--out {out}: end it in {', '.join(ENDINGS)}, or say --format")
    if chosen not in (None, named):
        raise ValueError(f"--out {out}: its ending and --format {chosen} differ")
    return named


def _print(found: Sequence[Reproduced], chosen: Sequence[str] | None) -> None:
    console = stdout_console()
    for name, group in groupby(found, key=lambda one: one.source):
        mine = list(group)
        console.print(f"{SOURCES[name].label}, {SOURCES[name].citation}", markup=False, highlight=False)
        console.print(Grid(HEADER, [cells_of(one) for one in mine], len(HEADER), FIRST_TO_GO, chosen))
        for remark in remarks(mine):
            console.print(printable(f"  {remark}"), markup=False, highlight=False, soft_wrap=True)
        console.print()
