"""`--dry-run`: the cells of a sweep with theory's predictions, the share of this machine's memory that they fill, and
the action for each: run, reuse or refuse.

With a launcher, also the jobs that run them: their numbers, and the launcher settings that request resources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config.cell import Cell
from ..config.compose import CommandLine, RefusedError, refuse_senseless
from ..config.flat import name_cells
from ..config.plugins import SWEEPER, LauncherChoice, Resources, at_once
from ..host.pipes import first_line
from ..host.terminal import print_on, stdout_console
from ..predict.estimate import Estimate, Fit, estimate, fit_of
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


def plan_composed(composed: CommandLine, chosen: Sequence[str] | None) -> int:
    """Prints what would run, in the columns `chosen`. Returns the exit code. Raises RefusedError for a sweeper that
    proposes cells, and if every cell is refused.
    """
    if composed.proposes:
        why = "its cells depend on the results of earlier ones and are not known in advance"
        raise RefusedError([f"--dry-run: {SWEEPER}={composed.sweeper}: {why}; leave one out"])
    refuse_senseless(composed.cells)
    return print_plan(composed.cells, chosen, composed.launcher) if composed.cells else 0


def print_plan(cells: list[Cell], chosen: Sequence[str] | None = None, launcher: LauncherChoice | None = None) -> int:
    """Prints the table with the columns `chosen`. Returns the exit code: 1 if a cell would be refused."""
    console, here = stdout_console(), launcher is None or launcher.is_here
    names = name_cells([cell.config for cell in cells])
    cells, fits, estimates, notes = list(cells), list[Fit | None](), list[Estimate | None](), list[str]()
    for index, cell in enumerate(cells):
        fits.append(fit_of(cell.config) if here and not cell.problems else None)
        prediction, problem = None, ""
        if not cell.problems:
            try:
                prediction = estimate(cell.config)
            except Exception as error:  # a user's builder may do things that a model without memory cannot
                problem = f"no prediction: the model cannot be built without allocating memory: {first_line(error)}"
        estimates.append(prediction)
        cells[index : index + 1] = fitting([cell]) if here else [cell]
        if reason := "; ".join(cells[index].problems) or problem:
            notes.append(f"{names[index]}: {reason}")
    plans = [_plan(cell, launcher) for cell in cells]
    jobs, by_job = _jobs(cells, plans, launcher) if launcher is not None else ({}, [])
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


def _jobs(
    cells: Sequence[Cell], plans: Sequence[str], launcher: LauncherChoice
) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the columns of the cells' jobs and of the resources they request, and a line on all jobs."""
    jobs, columns = list[Resources](), dict[str, list[str]]({JOB: [], ASKED: []})
    for cell, plan in zip(cells, plans, strict=True):
        settings: Mapping[str, Any] = {}
        if runs := plan.startswith(("run", "search")):
            jobs.append(resources_for(cell, launcher))
            settings = jobs[-1].settings(launcher)
        columns[JOB].append(str(len(jobs)) if runs else "–")
        columns[ASKED].append(" ".join(f"{key}={value}" for key, value in settings.items()) or "–")
    bound = at_once(launcher, jobs)
    line = f"{launcher.name}: {show_count(len(jobs), 'job')}"
    return columns, [line + (f", at most {bound} at once" if bound is not None and bound < len(jobs) else "")]


def _plan(cell: Cell, launcher: LauncherChoice | None) -> str:
    if cell.problems:
        return "refuse"
    if cell.config.search.memory_limit is not None:
        tries = sum(len(ladder) for ladder in combinations(cell))
        return f"search under {cell.config.search.memory_limit}, up to {tries} combinations"
    repeats = cell.config.measure.repeats
    missing = [
        find_reusable(launch) if launcher is None else find_elsewhere(launch, ("ok",), launcher.name)
        for launch in (replace(cell, repeat=repeat) for repeat in range(repeats))
    ].count(None)
    if not missing:
        return "reuse"
    return "run" if repeats == 1 else f"run {missing} of {repeats} launches"


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
