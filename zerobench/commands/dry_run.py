"""`--dry-run`: the cells of a sweep with theory's predictions, the share of this machine's memory that they fill, and
the action for each: run, reuse or refuse.

With a launcher, also the jobs that run them: their numbers, and the launcher settings that request resources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from ..config.cell import Cell, CellConfig
from ..config.flat import name_cells
from ..config.hydra_problems import first_line
from ..config.launcher import LauncherChoice, at_once
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


@dataclass(frozen=True)
class Planned:
    """A cell of the plan, as it would be run: refused if it does not fit. If `prediction` is None, `why` is the reason.
    `fit`: its place in this machine's memory; None if it needs none or runs elsewhere.
    """

    cell: Cell
    prediction: Estimate | None
    why: str
    fit: Fit | None

    @classmethod
    def of(cls, cell: Cell, here: bool) -> Planned:
        """Returns the plan of a composed cell. `here`: the cell runs on this machine."""
        if cell.problems:
            return cls(cell, None, "; ".join(cell.problems), None)
        fit, (prediction, why) = fit_of(cell.config) if here else None, _predict(cell.config)
        (checked,) = fitting([cell]) if here else [cell]
        return cls(checked, prediction, "; ".join(checked.problems) or why, fit)


def print_plan(cells: list[Cell], chosen: Sequence[str] | None = None, launcher: LauncherChoice | None = None) -> int:
    """Prints the table with the columns `chosen`. Returns the exit code: 1 if a cell would be refused."""
    console = stdout_console()
    names = name_cells([cell.config for cell in cells])
    planned = [Planned.of(cell, launcher is None or launcher.is_here) for cell in cells]
    cells = [one.cell for one in planned]
    plans = [_plan(cell, launcher) for cell in cells]
    jobs, by_job = _jobs(cells, launcher) if launcher is not None else ({}, [])
    columns = {"cell": names, "plan": plans} | _figures(planned) | jobs
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    console.print(Grid(list(columns), rows, 2, FIRST_TO_GO, chosen))
    notes = [f"{name}: {one.why}" for name, one in zip(names, planned, strict=True) if one.why]
    one_memory = [ONE_MEMORY] * ("host" in columns and any(cell.config.device == "cpu" for cell in cells))
    memories = dict.fromkeys((one.fit.place, one.fit.memory_bytes) for one in planned if one.fit is not None)
    words = f"{OF_MEMORY}: predicted states, of all ranks in it, over the"
    on_memory = [f"{words} {show_bytes(size)} that {place} has" for place, size in memories]
    for note in on_memory + one_memory + notes + by_job:
        print_on(console, note)
    counts = {word: sum(plan.startswith(word) for plan in plans) for word in ("run", "reuse", "refuse", "search")}
    words = ", ".join(f"{number} to {word}" for word, number in counts.items() if number)
    print_on(console, f"{show_count(len(cells), 'cell')}: {words}; nothing was started")
    return int(any(cell.problems for cell in cells))


def _jobs(cells: Sequence[Cell], launcher: LauncherChoice) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the columns of the cells' jobs and of the resources they request, and a line on all jobs."""
    wanted = [resources_for(cell, launcher) if _plan(cell, launcher).startswith(RUNS) else None for cell in cells]
    jobs = [one for one in wanted if one is not None]
    asked = [one.settings(launcher).items() if one else () for one in wanted]
    bound, numbers = at_once(launcher, jobs), count(1)
    words = f"{launcher.name}: {show_count(len(jobs), 'job')}"
    words += f", at most {bound} at once" * (bound is not None and bound < len(jobs))
    columns = {
        JOB: [str(next(numbers)) if one else "–" for one in wanted],
        ASKED: [" ".join(f"{key}={value}" for key, value in settings) or "–" for settings in asked],
    }
    return columns, [words]


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
        there = sum(find_reusable(cell, repeat) is not None for repeat in range(wanted))
    else:
        there = sum(find_elsewhere(cell, repeat, ("ok",), launcher.name) is not None for repeat in range(wanted))
    if there == wanted:
        return "reuse"
    return "run" if wanted == 1 else f"run {wanted - there} of {wanted} launches"


def _predict(config: CellConfig) -> tuple[Estimate | None, str]:
    try:
        return estimate(config), ""
    except Exception as error:  # a user's builder may do things that a model without memory cannot
        return None, f"no prediction, for the model cannot be built without memory: {first_line(error)}"


def _figures(planned: Sequence[Planned]) -> dict[str, list[str]]:
    """Formats the columns of predicted figures, without those that no cell has."""
    found = [one.prediction for one in planned]
    columns = {
        "ψ": ["–" if one is None else f"{one.psi:,}" for one in found],
        "formula": _sizes(found, "floor_bytes"),
        "predicted states": _sizes(found, "states_bytes"),
    }
    if any(one.fit for one in planned):
        shares = [one.fit.share if one.fit else None for one in planned]
        columns[OF_MEMORY] = [
            "–" if share is None else "< 1 %" if 0 < share < 0.01 else f"{share * 100:,.0f} %" for share in shares
        ]
    there = {name: key for name, key in SOMETIMES.items() if any(getattr(one, key) for one in found if one)}
    columns |= {name: _sizes(found, key) for name, key in there.items()}
    volumes = [None if one is None else one.volume_psi for one in found]
    return columns | {VOLUME: ["–" if one is None else f"{one:.3f}" for one in volumes]}


def _sizes(found: Sequence[Estimate | None], key: str) -> list[str]:
    return ["–" if one is None else show_bytes(getattr(one, key)) for one in found]
