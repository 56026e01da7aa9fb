"""`zerobench columns`: every column of every table, with its unit and meaning."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby

from ..config.unknown_keys import nearest
from ..records.describe import ROWS, Column, columns_of, said_of
from ..results.grid import Grid
from ..results.options import Parser, verb

WIDEST = 120
"""Width of lines where output is not a terminal."""

DESCRIPTION = """\
Prints the columns of the tables that zerobench.load and zerobench export give, with unit and
meaning, for all tables or for the chosen ones. Nothing is run, and no results are needed.
"""

EXAMPLES = """\
examples:
  zerobench columns                            every column of every table
  zerobench columns states_bytes               columns whose names contain it
  zerobench columns predicted --table runs     predictions in the table of runs
  zerobench columns --unit bytes --table steps,traffic
  zerobench columns --find allocator           columns whose name, unit or meaning contains it
  zerobench columns --format json              for programs; also csv and markdown
"""


@verb
def columns(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 if no column matches."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    tables = list(ROWS) if chosen.table is None else chosen.table.split(",")
    for table in tables:
        if table not in ROWS:
            hint = nearest(table, list(ROWS)) or f"; use {', '.join(ROWS)}"
            raise ValueError(f"--table {table}: no such table{hint}")
    there = [column for table in tables for column in columns_of(table)]
    units = sorted({column.unit for column in there} - {""})
    if chosen.unit is not None and chosen.unit not in units:
        raise ValueError(f"--unit {chosen.unit}: use one of {', '.join(units)}")
    found = [
        column
        for column in there
        if (not chosen.part or any(part.lower() in column.name for part in chosen.part))
        and chosen.unit in (None, column.unit)
        and (chosen.find or "").lower() in f"{column.name} {column.unit} {column.meaning}".lower()
    ]
    if not found:
        wanted = [*chosen.part, *([f"--find {chosen.find}"] if chosen.find else [])]
        close = nearest(chosen.part[0], sorted({column.name for column in there})) if chosen.part else ""
        of = f" of {chosen.table}" if chosen.table else ""
        raise ValueError(f"{' '.join(wanted)}: no such column{of}{close or '; zerobench columns alone prints all'}")
    sys.stdout.write(FORMATS[chosen.format](found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser("zerobench columns", DESCRIPTION, EXAMPLES)
    words = "a column's name, or a part of it; several names are alternatives"
    parser.add_argument("part", nargs="*", metavar="PART", help=words)
    parser.add_argument("--table", metavar="TABLE", help=f"only these tables, comma-separated: {', '.join(ROWS)}")
    parser.add_argument("--unit", help="only columns of this unit, such as bytes, s, 'elements / ψ'")
    parser.add_argument("--find", metavar="TEXT", help="only columns whose name, unit or meaning contains TEXT")
    parser.add_argument("--format", choices=tuple(FORMATS), default="text", help="default: %(default)s")
    return parser


def as_text(found: Sequence[Column]) -> str:
    """Formats a heading per table; name, unit and meaning, wrapped to the terminal's width."""
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
    name = max(len(column.name) for column in found) + 2
    unit = max(len(column.unit) for column in found) + 2
    lines = []
    for table, mine in groupby(found, key=lambda column: column.table):
        said = said_of(table)
        lines += [f"{table}: {said[:1].lower()}{said[1:]}", ""]
        for column in mine:
            start = f"  {column.name:<{name}}{column.unit:<{unit}}"
            # in a terminal too narrow for three columns, the meaning goes below
            fits = width - len(start) >= 30
            indent = len(start) if fits else 6
            meaning = textwrap.wrap(column.meaning, width - indent, break_on_hyphens=False)
            lines += [start + meaning.pop(0)] if fits else [start.rstrip()]
            lines += [" " * indent + line for line in meaning]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def as_markdown(found: Sequence[Column]) -> str:
    """Formats a heading and a pipe table per table."""
    lines = []
    for table, mine in groupby(found, key=lambda column: column.table):
        rows = [
            [f"`{one.name}`", f"{one.kind} or none" if one.optional else one.kind, one.unit, one.meaning]
            for one in mine
        ]
        grid = Grid(["column", "type", "unit", "meaning"], rows, left=4)
        lines += [f"## {table}", "", f"{said_of(table)}.", "", grid.markdown(is_markdown=True)]
    return "\n".join(lines)


def as_json(found: Sequence[Column]) -> str:
    """Formats a list of objects, one per column."""
    return json.dumps([asdict(column) for column in found], indent=2, ensure_ascii=False) + "\n"


def as_csv(found: Sequence[Column]) -> str:
    """Formats a line per column, with a header."""
    return Grid(list(asdict(found[0])), [list(map(str, asdict(column).values())) for column in found]).csv()


FORMATS: dict[str, Callable[[Sequence[Column]], str]] = {
    "text": as_text,
    "markdown": as_markdown,
    "csv": as_csv,
    "json": as_json,
}
"""Choice of --format -> formatter."""
