"""Recorded limits: a budget file next to the test's file, with the same name and the suffix `.zerobench.yaml`.

It is written by `pytest --zerobench-record`, with a cell per watch of a test, named like the test within its file, and
budgets per environment like any budget file. Measured values travel as plain values: from a rank to the test's process,
and from a worker of pytest-xdist to its controller, which writes everything at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..judging import lines
from ..judging.budget_file import BudgetFile, CellBudget, environment_of, read_budget, write_budget
from ..judging.judge import MAXIMA, PARTS
from ..judging.recording import Wanted, record_cell
from ..results.frames import records_of
from ..results.tables import Results
from ..sizes import show_count
from .limits import GateError

SUFFIX = ".zerobench.yaml"

MEMORY = ("peak_bytes", "growth_bytes", "states_bytes", *MAXIMA)
TRAFFIC = ("volume_psi", *PARTS, "wire_bytes", "control_bytes")
"""Metrics that are recorded: they repeat to the byte; traffic only if there are several ranks."""


@dataclass(frozen=True)
class Home:
    """Location of a test's record. `nodeid`: the test, in pytest's notation."""

    path: Path
    nodeid: str

    @classmethod
    def of(cls, test_file: Path, nodeid: str) -> Home:
        """Returns the home of a test."""
        return cls(test_file.with_name(f"{test_file.stem}{SUFFIX}"), nodeid)

    @property
    def how(self) -> str:
        """Explains how to record the test."""
        return f"record it with: pytest '{self.nodeid}' --zerobench-record, and commit {self.path.name}"


def measured(results: Results, name: str) -> dict[str, Any]:
    """Returns the row of a watch as plain values, under the name of its cell."""
    row = records_of(results.runs.iloc[:1])[0]
    metrics = (*MEMORY, *(TRAFFIC if row["world_size"] > 1 else ()))
    about = ("status", "reason", "commit", "torch_version", "processor", "cores")
    plain = {key: row[key] for key in (*metrics, *about)}
    environment = environment_of(row["device_class"], row["torch_version"])
    by_line = lines.plain(lines.lines_of(results.lines))
    return plain | {"name": name, "work": None, "environment": environment, "lines": by_line}


def recorded_budget(home: Home, name: str, environment: str) -> CellBudget:
    """Returns a watch's recorded limits, including those for any environment. Raises GateError with the command to
    record.
    """
    if not home.path.is_file():
        raise GateError(f"zerobench: {name} has no limit and no record; give its marker a limit, or {home.how}")
    file = read_budget(home.path)
    cells = [cell for cell_name, cell in file.of(environment) if cell_name == name]
    if cells:
        limits = {metric: limit for cell in cells for metric, limit in cell.limits.items()}
        return CellBudget(None, limits, lines=cells[-1].lines)
    others = [other for other, budgets in file.environments.items() if name in budgets.cells]
    where = f"for {environment}; there is one for: {', '.join(others)}" if others else f"in {home.path.name}"
    raise GateError(f"zerobench: {name} has no record {where}; {home.how}")


def write(recorded: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """Writes rows to the budget files at their paths, keeping manual ceilings and tolerances. Returns messages."""
    messages: list[str] = []
    by_path: dict[str, list[dict[str, Any]]] = {}
    for path, row in recorded:
        by_path.setdefault(path, []).append(row | {"lines": lines.parse_lines(row["lines"])})
    for path, rows in sorted(by_path.items()):
        file = read_budget(Path(path)) if Path(path).is_file() else BudgetFile(Path(path))
        names = {str(row["name"]) for row in rows}
        for row in sorted(rows, key=lambda row: str(row["name"])):
            changes, _ = record_cell(file, row, Wanted((*MEMORY, *TRAFFIC)), names)
            for cell, metric, before, now, by, *cause in (change.row for change in changes if change.metric):
                moved = "; ".join(filter(None, cause))
                messages.append(f"{cell}: {metric}: {before} before, {now} now: {by}{f' ({moved})' if moved else ''}")
        write_budget(file)
        messages.append(f"{path}: {show_count(len(rows), 'record')} written")
    return messages
