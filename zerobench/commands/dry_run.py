"""`--dry-run`: the cells of a sweep with theory's predictions, and the action for each: run, reuse or refuse."""

from __future__ import annotations

from collections.abc import Sequence

from ..config.cell import Cell, CellConfig
from ..config.compose import first_line
from ..config.names import name_cells
from ..host.terminal import stdout_console
from ..predict.estimate import Estimate, estimate
from ..results.fitted_table import plain_table
from ..results.printed_table import ONE_MEMORY
from ..sizes import show_bytes, show_count
from ..sweep.reuse import find_reusable
from ..sweep.search import combinations

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

ALL_COLUMNS = (*HEADER, *SOMETIMES, VOLUME)

FIRST_TO_GO = ("up", "down", "between nodes", "files", "formula", "ψ", "host", VOLUME)


def print_plan(cells: list[Cell], chosen: Sequence[str] | None = None) -> int:
    """Prints the table, of the columns `chosen`. Returns the exit code: 1 if a cell would be refused."""
    console = stdout_console()
    names = name_cells([cell.config for cell in cells])
    plans = [_plan(cell) for cell in cells]
    found = [(None, "; ".join(cell.problems)) if cell.problems else _predict(cell.config) for cell in cells]
    there = [name for name, key in SOMETIMES.items() if any(getattr(one, key) for one, _ in found if one)]
    rows = [[name, plan, *_show(one, there)] for name, plan, (one, _) in zip(names, plans, found, strict=True)]
    notes = [f"{name}: {why}" for name, (_, why) in zip(names, found, strict=True) if why]
    console.print(plain_table([*HEADER, *there, VOLUME], rows, 2, FIRST_TO_GO, chosen))
    one_memory = [ONE_MEMORY] * ("host" in there and any(cell.config.device == "cpu" for cell in cells))
    for note in one_memory + notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    count = {word: sum(plan.startswith(word) for plan in plans) for word in ("run", "reuse", "refuse", "search")}
    words = ", ".join(f"{number} to {word}" for word, number in count.items() if number)
    console.print(f"{show_count(len(cells), 'cell')}: {words}; nothing was started", highlight=False)
    return int(any(cell.problems for cell in cells))


def _plan(cell: Cell) -> str:
    if cell.problems:
        return "refuse"
    if cell.config.search.memory_limit is not None:
        tries = sum(len(ladder) for ladder in combinations(cell))
        return f"search under {cell.config.search.memory_limit}, up to {tries} combinations"
    wanted = cell.config.measure.repeats
    there = sum(find_reusable(cell, repeat) is not None for repeat in range(wanted))
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
