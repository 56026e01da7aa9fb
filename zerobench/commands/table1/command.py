"""`zerobench table1`: executes the cells of table 1 on fake tensors, and writes them down as they end.

A cell that is in the csv already is not executed again, so a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...fake_execution import Execution, Limits, execute_all
from ...host.terminal import progress_console, stdout_console
from ...results.grid import Grid
from ...results.options import Parser, add_columns
from ...sizes import printable, show_bytes
from .cells import Place, matching, places
from .paper import STAGES
from .rows import GB, CellRow, StatesRow, in_order, place_of, read, row_of, states_of, write

FOLDER = Path("results/table1")
CELLS, IN_FLIGHT = "cells.csv", "in_flight.csv"
HEADER = ["cell", "ψ", "printed GB", "how", "formula GB", "at own ψ", "executed", "×", "replayed"]

EPILOG = """\
examples:
  zerobench table1                           all cells that are not in results/table1 yet: 10 minutes on two cores
  zerobench table1 --only 7.5B N=64          figure 1 of the paper
  zerobench table1 --only 1T N=1024 --rerun  1T parameters under each stage again
  python analysis/table1.py                  the figures

Exit code: 0 all cells executed, 1 some were not, 2 the command was wrong, 130 interrupted."""


def table1(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, 1 where a cell was not executed, 2 for a refusal, 130 stopped."""
    chosen = _parser().parse_args(arguments)
    try:
        wanted = matching(places(), chosen.only or [])
        book = Book.open(chosen.out)
    except (ValueError, OSError) as error:
        print(printable(f"zerobench table1: {error}"), file=sys.stderr)
        return 2
    due = [place for place in wanted if chosen.rerun or place not in book.cells]
    begun = time.perf_counter()
    try:
        problems = _execute(due, book, chosen.jobs)
    except KeyboardInterrupt:
        print(f"zerobench table1: stopped; {len(book.cells)} cells are in {chosen.out}", file=sys.stderr)
        return 130
    _show([book.cells[place] for place in wanted if place in book.cells], chosen.columns)
    if due:
        most = max((book.cells[place].resident_bytes for place in due if place in book.cells), default=0)
        took = f"{time.perf_counter() - begun:.0f} s"
        print(f"{len(due)} cells executed in {took}; no process had more than {show_bytes(most)} of resident memory")
    print(f"in {chosen.out}: {CELLS}, {IN_FLIGHT}")
    for problem in problems:
        print(printable(f"zerobench table1: {problem}"), file=sys.stderr)
    return int(bool(problems))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "zerobench table1", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Table 1 of the ZeRO paper, executed: model states per rank at 7.5B, 128B and 1T parameters on\n"
        "1 to 1,024 ranks, under each stage. Each cell runs the engine's own code on fake tensors; formula and\n"
        "printed number stand beside it.",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cells with all of these: 7.5B, N=64, zero3 ...")
    parser.add_argument("--rerun", action="store_true", help="execute also what the csv has")
    parser.add_argument("--jobs", type=int, help="cells at once (default: one per core)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the csv files (default: %(default)s)")
    add_columns(parser, HEADER)
    return parser


@dataclass
class Book:
    """The two csv files, written whole after each cell."""

    folder: Path
    cells: dict[Place, CellRow] = field(default_factory=dict)
    parts: dict[Place, list[StatesRow]] = field(default_factory=dict)

    @staticmethod
    def open(folder: Path) -> Book:
        """Reads what is there. Raises ValueError for files of other columns."""
        book = Book(folder, {place_of(row): row for row in read(folder / CELLS, CellRow)})
        for row in read(folder / IN_FLIGHT, StatesRow):
            book.parts.setdefault(place_of(row), []).append(row)
        folder.mkdir(parents=True, exist_ok=True)
        return book

    def add(self, place: Place, found: Execution) -> None:
        """Writes down an execution that went well."""
        self.cells[place], self.parts[place] = row_of(place, found), states_of(place, found)
        every = places()
        write(self.folder / CELLS, CellRow, in_order(self.cells.values(), every))
        parts = (part for mine in self.parts.values() for part in mine)
        write(self.folder / IN_FLIGHT, StatesRow, in_order(parts, every))


def _execute(due: Sequence[Place], book: Book, jobs: int | None) -> list[str]:
    """Executes cells, several at once. Returns a sentence per cell that was not."""
    problems: list[str] = []
    configs = [place.config for place in due]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress_console()) as progress:
        whole = progress.add_task("cells", total=len(due))
        running: dict[int, Any] = {}

        def tell(number: int, news: dict[str, Any] | Execution) -> None:
            if isinstance(news, Execution):
                if news.problem:
                    problems.append(f"{due[number]}: {news.problem}")
                else:
                    book.add(due[number], news)
                if number in running:
                    progress.remove_task(running.pop(number))
                progress.advance(whole)
            else:
                task = running.get(number)
                if task is None:
                    task = running[number] = progress.add_task(f"  {due[number]}", total=news["steps"])
                progress.update(task, completed=news["step"])

        execute_all(configs, jobs=jobs, tell=tell, limits=Limits(seconds=1800))
    return problems


def _show(rows: Sequence[CellRow], chosen: Sequence[str] | None) -> None:
    table = [
        [str(place_of(row)).replace(row.strategy, STAGES.get(row.strategy, row.strategy)), f"{row.psi / 1e9:.2f}e9",
         row.printed_gb, row.how_printed, *(f"{size / GB:.2f}" for size in (
            row.paper_formula_bytes, row.formula_bytes, row.executed_bytes)),
         f"{row.executed_bytes / row.formula_bytes:.3f}", f"{row.replayed_bytes - row.executed_bytes:+d} B"]
        for row in rows
    ]  # fmt: skip
    stdout_console().print(Grid(HEADER, table, 1, ("replayed", "ψ", "at own ψ", "how", "×"), chosen))
