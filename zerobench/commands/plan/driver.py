"""Runs the searches of all rows side by side: what each wants next is executed together, and each cell once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ...config.cell import Cell, CellConfig
from ...fake_execution import Execution
from ...host.terminal import progress_console
from .axis import Axis
from .bound import states_of
from .candidates import Candidate
from .capacity import Used, used_of
from .search import Probe, Row, Search

Execute = Callable[[list[CellConfig]], list[Execution]]
Tell = Callable[[int, int, str], None]
"""Takes how many cells were executed, how many searches are open, and the name of the last cell."""


def run_searches(searches: list[Search], execute: Execute, tell: Tell = lambda *_: None) -> list[Row]:
    """Returns the rows of the searches, in their order."""
    known: dict[str, Used | str] = {}
    rows: dict[int, Row] = {}
    wanted: dict[int, Cell] = {}
    for number, search in enumerate(searches):
        _advance(number, search, None, wanted, rows)
    while wanted:
        new = {cell.cell_id: cell for cell in wanted.values() if cell.cell_id not in known}
        for cell, execution in zip(new.values(), execute([cell.config for cell in new.values()]), strict=True):
            known[cell.cell_id] = _used(cell, execution)
        tell(len(known), len(wanted), "")
        for number, cell in list(wanted.items()):
            del wanted[number]
            _advance(number, searches[number], known[cell.cell_id], wanted, rows)
    return [rows[number] for number in range(len(searches))]


def with_least(rows: list[Row], cells: dict[Candidate, Cell], axis: Axis, execute: Execute) -> list[Row]:
    """Returns the rows with that of the least states executed at its emptiest, so that a plan in which theory has
    pruned all can say which device would do.
    """
    pruned = [row for row in rows if row.bound_bytes is not None]
    if not pruned:
        return rows
    least = min(pruned, key=lambda row: row.bound_bytes or 0)
    cell = axis.changed(cells[least.candidate], axis.values[0])
    used = _used(cell, execute([cell.config])[0])
    if isinstance(used, str):
        return [replace(row, problem=used, bound_bytes=None) if row is least else row for row in rows]
    probe = Probe(axis.values[0], cell, used)
    return [replace(row, problem="", beyond=probe, probes=(probe,)) if row is least else row for row in rows]


def _advance(
    number: int, search: Search, answer: Used | str | None, wanted: dict[int, Cell], rows: dict[int, Row]
) -> None:
    """Takes a search to the next cell that it wants, or to its row."""
    try:
        wanted[number] = next(search) if answer is None else search.send(answer)
    except StopIteration as stop:
        rows[number] = stop.value


def _used(cell: Cell, execution: Execution) -> Used | str:
    if execution.problem:
        return execution.problem
    predicted = states_of(cell)
    return used_of(execution, predicted.psi if predicted is not None else 0)


@contextmanager
def progress() -> Iterator[Tell]:
    """Shows on a terminal how far the searches are."""
    console = progress_console()
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        task = bar.add_task("theory's bounds first", total=None)

        def tell(executed: int, open_: int, name: str) -> None:
            bar.update(task, description=f"{executed} cells executed, {open_} rows still looked for {name}".rstrip())

        yield tell
