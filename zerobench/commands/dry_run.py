"""`--dry-run`: the cells of a sweep with theory's predictions, and the action for each: run, reuse or refuse.

Under a launcher the jobs that run them too: their numbers, and the settings of the launcher that ask for resources.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..config.cell import Cell, CellConfig
from ..config.hydra_words import first_line
from ..config.launcher import LauncherChoice
from ..config.names import name_cells
from ..dispatch.plan import at_once, groups_of, resources_for, settings_for
from ..host.terminal import stdout_console
from ..predict.estimate import Estimate, estimate
from ..results.fitted_table import plain_table
from ..results.printed_table import ONE_MEMORY
from ..sizes import show_bytes, show_count
from ..sweep.reuse import find_elsewhere, find_reusable
from ..sweep.search import combinations, is_search
from ..sweep.sweep import rounds

HEADER = ["cell", "plan", "ψ", "formula", "predicted states"]

SOMETIMES = {
    "host": "host_bytes",
    "files": "file_bytes",
    "down": "down_bytes",
    "up": "up_bytes",
    "between nodes": "between_bytes",
}
"""Column -> bytes of an estimate; shown where any cell has some."""

VOLUME = "predicted volume ψ"

JOB, ASKED = "job", "asks for"

ALL_COLUMNS = (*HEADER, *SOMETIMES, VOLUME, JOB, ASKED)

FIRST_TO_GO = ("up", "down", "between nodes", "files", "formula", "ψ", "host", VOLUME)


def print_plan(cells: list[Cell], chosen: Sequence[str] | None = None, launcher: LauncherChoice | None = None) -> int:
    """Prints the table, of the columns `chosen`. Returns the exit code: 1 if a cell would be refused."""
    console = stdout_console()
    names = name_cells([cell.config for cell in cells])
    plans = [_plan(cell, launcher) for cell in cells]
    jobs, by_job = _jobs(cells, launcher) if launcher is not None else ([], [])
    found = [(None, "; ".join(cell.problems)) if cell.problems else _predict(cell.config) for cell in cells]
    there = [name for name, key in SOMETIMES.items() if any(getattr(one, key) for one, _ in found if one)]
    rows = [[name, plan, *_show(one, there)] for name, plan, (one, _) in zip(names, plans, found, strict=True)]
    rows = [[*row, *job] for row, job in zip(rows, jobs or [[]] * len(rows), strict=True)]
    notes = [f"{name}: {why}" for name, (_, why) in zip(names, found, strict=True) if why]
    header = [*HEADER, *there, VOLUME, *([JOB, ASKED] if launcher is not None else [])]
    console.print(plain_table(header, rows, 2, FIRST_TO_GO, chosen))
    one_memory = [ONE_MEMORY] * ("host" in there and any(cell.config.device == "cpu" for cell in cells))
    for note in one_memory + notes + by_job:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    count = {word: sum(plan.startswith(word) for plan in plans) for word in ("run", "reuse", "refuse", "search")}
    words = ", ".join(f"{number} to {word}" for word, number in count.items() if number)
    console.print(f"{show_count(len(cells), 'cell')}: {words}; nothing was started", highlight=False)
    return int(any(cell.problems for cell in cells))


def _jobs(cells: Sequence[Cell], launcher: LauncherChoice) -> tuple[list[list[str]], list[str]]:
    """Returns for each cell its job's number and what that asks for, and a sentence on all jobs."""
    launches = [launch for launch in rounds(list(cells)) if not launch.cell.problems]
    left = [one for one in launches if find_elsewhere(one.cell, one.repeat, ("ok",), launcher.name) is None]
    told: dict[int, list[str]] = {}
    groups = groups_of([launch for launch in left if not is_search(launch.cell)])
    wanted = [resources_for(group, launcher) for group in groups]
    for number, (group, resources) in enumerate(zip(groups, wanted, strict=True), 1):
        asked = " ".join(f"{key}={value}" for key, value in settings_for(resources, launcher).items())
        told |= {id(launch.cell): [str(number), asked or "–"] for launch in group}
    bound = at_once(launcher, wanted)
    words = f"{launcher.name}: {show_count(len(groups), 'job')}"
    words += f", at most {bound} at once" * (bound is not None and bound < len(groups))
    words += "; combinations of a search are a job each" * any(is_search(cell) for cell in cells)
    return [told.get(id(cell), ["–", "–"]) for cell in cells], [words]


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


def _show(prediction: Estimate | None, there: list[str]) -> list[str]:
    """Formats ψ, the formula's states and those on the device, the bytes of the columns `there`, volume."""
    if prediction is None:
        return ["–"] * (4 + len(there))
    sizes = [prediction.floor_bytes, prediction.states_bytes, *(getattr(prediction, SOMETIMES[name]) for name in there)]
    volume = "–" if prediction.volume_psi is None else f"{prediction.volume_psi:.3f}"
    return [f"{prediction.psi:,}", *map(show_bytes, sizes), volume]
