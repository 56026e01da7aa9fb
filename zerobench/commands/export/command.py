"""`zerobench export`: the verb. A format is either text, one table of all runs, or files for another program."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ...host.pipes import print_line
from ...results import tables
from ...results.options import RESULTS, Parser, add_options, add_price, verb
from ...results.selection import latest
from ...sizes import show_count
from .perfetto import write_perfetto
from .table import TEXTS, note_of, select, to_latex


def collect(results: tables.Results, out: Path) -> str:
    """Writes a collection into the folder `out`."""
    tables.collect(results, out)
    return f"{out}: {show_count(len(results.runs), 'run')}, a table each as parquet; zerobench.load reads it"


LATEX = "latex"

FILES: dict[str, Callable[[tables.Results, Path], str]] = {
    "parquet": collect,
    "perfetto": write_perfetto,
}
"""Format -> function that writes runs to --out and returns a message on what it wrote."""


@verb
def export(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 for a folder or column that does not exist."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.format in FILES and chosen.out is None:
        where = "FILE" if chosen.format == "perfetto" else "FOLDER"
        parser.error(f"--format {chosen.format} needs --out {where}")
    results, _ = tables.load(chosen.runs).chosen(chosen.where)
    if chosen.format in FILES:
        kept = latest(results.runs)["run_id"] if chosen.latest else results.runs["run_id"]
        print_line(FILES[chosen.format](results.of(kept), chosen.out))
        return 0
    if chosen.format == LATEX:
        text = to_latex(results, chosen.table, chosen.columns, chosen.price)
    else:
        short = chosen.format == "markdown"
        frame, columns = select(results, chosen.table, chosen.columns, chosen.latest, short, chosen.price)
        text = TEXTS[chosen.format](frame[columns]) + (note_of(frame, columns) if short else "")
    if chosen.out is None:
        sys.stdout.write(text)
    else:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(text, encoding="utf-8")
        print_line(f"{chosen.out}: the table {chosen.table} of {chosen.runs} as {chosen.format}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "zerobench export",
        "Writes finished runs for other programs, as in: zerobench export results/runs --out runs.csv, or"
        " zerobench export results/runs --where strategy=zero3 --format perfetto --out step.json",
    )
    parser.add_argument("runs", nargs="?", default=RESULTS, help="a results folder or a run (default: %(default)s)")
    parser.add_argument(
        "--format",
        choices=(*TEXTS, LATEX, *FILES),
        default="csv",
        help="csv, markdown: one table as text; latex: one table for a paper, a row per cell (its newest launches"
        " together), with units and 95 %% intervals, for the package booktabs; parquet: every table of all runs as one"
        " file each in the folder --out, which zerobench.load reads; perfetto: the step of all ranks (of runs with"
        " measure.events=true) as one trace in the file --out, for ui.perfetto.dev",
    )
    parser.add_argument("--table", choices=tuple(tables.ALL_TABLES), default="runs", help="for csv, markdown and latex")
    parser.add_argument("--columns", help="comma-separated; default: all for csv, a short set for runs else")
    parser.add_argument("--latest", action="store_true", help="the newest run of each cell only")
    add_price(parser)
    add_options(parser, attempts=False)
    parser.add_argument(
        "--out", type=Path, help="a file (default: standard output; for perfetto also .json.gz); for parquet a folder"
    )
    return parser
