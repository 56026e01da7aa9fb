"""`--dry-run`: the cells of a sweep with theory's predictions, the share of this machine's memory that they fill, and
the action for each: run, reuse or refuse.

With a launcher, also the jobs that run them: their numbers, and the launcher settings that request resources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from ..config.cell import Cell, CellConfig
from ..config.flat import name_cells
from ..config.plugins import LauncherChoice, at_once
from ..host.pipes import first_line
from ..host.terminal import print_on, stdout_console
from ..predict.estimate import Estimate, estimate
from ..predict.fit import Fit, fit_of
from ..results.grid import Grid
from ..results.printed_table import ONE_MEMORY
from ..sizes import show_bytes, show_count
from ..sweep.cell import find_elsewhere, find_reusable
from ..sweep.command import fitting
from ..sweep.jobs import resources_for
from ..sweep.search import combinations

HEADER = ["cell", "plan", "ψ", "formula", "predicted states"]

SOMETIMES = {
    "host": "host_bytes",
    "files": "file_bytes",
    "down": "down_bytes",
    "up": "up_bytes",
    "between nodes": "between_bytes",
}
"""Column -> bytes of an estimate; shown if any cell has some."""

OF_MEMORY = "of memory"
"""Column of the share of this machine's memory that the states of all ranks fill, if the cells run here."""

VOLUME = "predicted volume ψ"

JOB, ASKED = "job", "asks for"

ALL_COLUMNS = (*HEADER, OF_MEMORY, *SOMETIMES, VOLUME, JOB, ASKED)

FIRST_TO_GO = ("up", "down", "between nodes", "files", "formula", "ψ", "host", VOLUME, OF_MEMORY)


def print_plan(cells: list[Cell], chosen: Sequence[str] | None = None, launcher: LauncherChoice | None = None) -> int:
    """Prints the table with the columns `chosen`. Returns the exit code: 1 if a cell would be refused."""
    console, here = stdout_console(), launcher is None or launcher.is_here
    names = name_cells([cell.config for cell in cells])
    cells, fits, estimates, notes = list(cells), list[Fit | None](), list[Estimate | None](), list[str]()
    for index, cell in enumerate(cells):
        fits.append(fit_of(cell.config) if here and not cell.problems else None)
        prediction, problem = (None, "") if cell.problems else _predict(cell.config)
        estimates.append(prediction)
        cells[index : index + 1] = fitting([cell]) if here else [cell]
        if reason := "; ".join(cells[index].problems) or problem:
            notes.append(f"{names[index]}: {reason}")
    plans = [_plan(cell, launcher) for cell in cells]
    jobs, by_job = _jobs(cells, launcher) if launcher is not None else ({}, [])
    columns = {"cell": names, "plan": plans} | _figures(estimates, fits) | jobs
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    console.print(Grid(list(columns), rows, 2, FIRST_TO_GO, chosen))
    one_memory = [ONE_MEMORY] * ("host" in columns and any(cell.config.device == "cpu" for cell in cells))
    memories = dict.fromkeys((fit.owner, show_bytes(fit.memory_bytes)) for fit in fits if fit is not None)
    states = f"{OF_MEMORY}: predicted states, of all ranks in it, over the"
    on_memory = [f"{states} {size} that {owner} has" for owner, size in memories]
    for note in on_memory + one_memory + notes + by_job:
        print_on(console, note)
    counts = {verb: sum(plan.startswith(verb) for plan in plans) for verb in ("run", "reuse", "refuse", "search")}
    actions = ", ".join(f"{number} to {verb}" for verb, number in counts.items() if number)
    print_on(console, f"{show_count(len(cells), 'cell')}: {actions}; nothing was started")
    return int(any(cell.problems for cell in cells))


def _jobs(cells: Sequence[Cell], launcher: LauncherChoice) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the columns of the cells' jobs and of the resources they request, and a line on all jobs."""
    wanted = [resources_for(cell, launcher) if _plan(cell, launcher).startswith(RUNS) else None for cell in cells]
    jobs, numbers = [job for job in wanted if job is not None], count(1)
    settings = [job.settings(launcher).items() if job else () for job in wanted]
    bound = at_once(launcher, jobs)
    line = f"{launcher.name}: {show_count(len(jobs), 'job')}"
    line += f", at most {bound} at once" if bound is not None and bound < len(jobs) else ""
    columns = {
        JOB: [str(next(numbers)) if job else "–" for job in wanted],
        ASKED: [" ".join(f"{key}={value}" for key, value in of_job) or "–" for of_job in settings],
    }
    return columns, [line]


RUNS = ("run", "search")
"""Beginnings of the plans of cells that need a job."""


def _plan(cell: Cell, launcher: LauncherChoice | None) -> str:
    if cell.problems:
        return "refuse"
    if cell.config.search.memory_limit is not None:
        tries = sum(len(ladder) for ladder in combinations(cell))
        return f"search under {cell.config.search.memory_limit}, up to {tries} combinations"
    wanted = cell.config.measure.repeats
    if launcher is None:
        there = sum(find_reusable(replace(cell, repeat=repeat)) is not None for repeat in range(wanted))
    else:
        there = sum(
            find_elsewhere(replace(cell, repeat=repeat), ("ok",), launcher.name) is not None for repeat in range(wanted)
        )
    if there == wanted:
        return "reuse"
    return "run" if wanted == 1 else f"run {wanted - there} of {wanted} launches"


def _predict(config: CellConfig) -> tuple[Estimate | None, str]:
    try:
        return estimate(config), ""
    except Exception as error:  # a user's builder may do things that a model without memory cannot
        return None, f"no prediction, for the model cannot be built without memory: {first_line(error)}"


def _figures(estimates: Sequence[Estimate | None], fits: Sequence[Fit | None]) -> dict[str, list[str]]:
    """Returns the columns of predicted figures, without those that no cell has."""

    def column(figure: str, shown: Callable[[Any], str] = show_bytes) -> list[str]:
        return ["–" if (size := getattr(row, figure, None)) is None else shown(size) for row in estimates]

    columns = {"ψ": column("psi", "{:,}".format), "formula": column("floor_bytes")}
    columns["predicted states"] = column("states_bytes")
    if any(fits):
        shares = [fit.share if fit else None for fit in fits]
        columns[OF_MEMORY] = [
            "–" if share is None else "< 1 %" if 0 < share < 0.01 else f"{share * 100:,.0f} %" for share in shares
        ]
    for name, figure in SOMETIMES.items():
        if any(getattr(row, figure, None) for row in estimates):
            columns[name] = column(figure)
    return columns | {VOLUME: column("volume_psi", "{:.3f}".format)}
