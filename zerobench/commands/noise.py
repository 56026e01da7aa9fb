"""`zerobench noise`: the variation of times between launches of identical code on this machine, measured and shown.

Definition and storage of a *noise floor*: budgets/comparison.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..budgets.comparison import NoiseFloor, floor_from, noise_environment, read_floors, write_floor
from ..config.cell import Cell, CellConfig
from ..config.compose import RefusedError, compose_cells
from ..config.world import has_times
from ..host.pipes import print_line, print_note
from ..host.terminal import stdout_console
from ..results.grid import Grid
from ..results.options import Parser, verb
from ..results.selection import latest
from ..results.summary import LEAST_LAUNCHES
from ..sweep.command import check_folders
from ..sweep.progress import Reporter
from ..sweep.sweep import Sweep
from .compare import NOISE_FOLDER
from .interleave import load_side

STANDARD = ("strategy=ddp", "model=gpt_small", "rerun=true", "results_dir=results/runs/noise")
"""The default cell; it is always measured again, since noise changes from day to day, and is stored separately."""

MOST_PLAUSIBLE = 0.5
"""Largest plausible floor: above it the machine was disturbed, and every change would count as noise."""

SHOWN_PAIRS = (1, 3, 5)


@verb
def noise(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0 recorded or shown, 1 a launch failed, 2 invalid command, 130 stopped."""
    description = "Records how much times differ between launches of one cell, or shows the recorded spread."
    more = f"record takes overrides as a run does; without any it measures {' '.join(STANDARD[:2])}."
    parser = Parser("zerobench noise", description, more)
    add = parser.add_argument
    add("action", choices=("record", "show"))
    add("--noise", type=Path, default=Path(NOISE_FOLDER), metavar="DIR", help="the records (default: %(default)s)")
    add("--launches", type=int, default=6, help=f"at least {LEAST_LAUNCHES}; more make it sharper (default: 6)")
    add("--runs", metavar="PATH", help="use the launches of these runs, all of one cell, and run nothing")
    chosen, overrides = parser.parse_known_args(arguments)
    if overrides and (chosen.action == "show" or chosen.runs is not None):
        raise ValueError(f"{' '.join(overrides)}: only a record that runs a cell takes overrides")
    if chosen.action == "show":
        if floors := read_floors(chosen.noise):
            _print(floors)
        else:
            print_line(f"{chosen.noise}: no noise floor is recorded; zerobench noise record measures it")
        return 0
    if chosen.runs is not None:
        runs = latest(load_side(chosen.runs).runs)
        runs = runs[(runs["status"] == "ok") & runs["step_s"].notna()]
        if (count := runs["cell_id"].nunique()) != 1:
            hint = "name one, as in --runs 'results/runs/ddp-*'"
            raise ValueError(f"{chosen.runs}: holds {count} cells that are ok; {hint}")
        launches: list[Any] = runs.to_dict("records")
        environments = [noise_environment(launch) for launch in launches]
        if differing := [key for key in environments[0] if len({other[key] for other in environments}) > 1]:
            message = f"its launches differ in {', '.join(differing)}; a noise floor is of one environment"
            raise ValueError(f"{chosen.runs}: {message}")
        return _record(chosen.noise, launches, CellConfig.from_json(launches[0]["config"]))
    cell = _compose(overrides, chosen.launches)
    check_folders([cell])
    with Reporter() as reporter:
        sweep = Sweep(reporter)
        sweep.run([cell])
    failed = [row for row in sweep.rows if row.status != "ok"]
    if sweep.stopped or failed:
        why = "; ".join(row.reason for row in failed)
        print_note(f"zerobench noise: nothing is recorded: {why}")
        return 130 if sweep.stopped else 1
    return _record(chosen.noise, [vars(row) for row in sweep.rows], cell.config)


def _compose(overrides: list[str], launches: int) -> Cell:
    """Composes the one cell to measure. Raises RefusedError."""
    if launches < LEAST_LAUNCHES:
        raise RefusedError([f"--launches {launches}: must be at least {LEAST_LAUNCHES}"])
    given = {override.partition("=")[0] for override in overrides}
    defaults = (*STANDARD, f"measure.repeats={launches}")
    cells = compose_cells([*(word for word in defaults if word.partition("=")[0] not in given), *overrides])
    if len(cells) != 1:
        raise RefusedError([f"{' '.join(overrides)}: makes {len(cells)} cells; noise is measured on one"])
    if cells[0].problems:
        raise RefusedError(list(cells[0].problems))
    if not has_times(cells[0].config):
        why = "which a simulated world, ranks that share a GPU and measure.passes=accounted do not have"
        raise RefusedError([f"a noise floor is of times, {why}"])
    if cells[0].config.nodes > 1:
        raise RefusedError([f"nodes={cells[0].config.nodes}: a noise floor is of one machine; take ranks of one"])
    if cells[0].config.measure.repeats < LEAST_LAUNCHES:
        raise RefusedError([f"measure.repeats={cells[0].config.measure.repeats}: must be at least {LEAST_LAUNCHES}"])
    return cells[0]


def _record(folder: Path, launches: list[dict[str, Any]], config: CellConfig) -> int:
    floor = floor_from(launches, config)
    if floor.of("step_s", SHOWN_PAIRS[1]) > MOST_PLAUSIBLE:
        shown = ", ".join(f"{1000 * seconds:.1f}" for seconds in floor.medians["step_s"])
        reason = f"its launches took {shown} ms a step: with such a spread every change would be noise"
        print_note(f"zerobench noise: nothing is recorded: {floor.cell}: {reason}")
        print_note("Try on a quiet machine, with more --launches, or with a longer step.")
        return 1
    path = write_floor(folder, floor)
    _print([floor])
    print_line(f"recorded in {path}; zerobench compare looks it up")
    return 0


def _print(floors: list[NoiseFloor]) -> None:
    """Prints, by the number of pairs of launches, the difference in step times that identical code stays within in 95 %
    of comparisons.
    """
    header = ["environment", "measured on", *(f"{k} pair{'s' * (k > 1)}" for k in SHOWN_PAIRS)]
    rows = []
    for floor in floors:
        where = "{device_class}, {processor}, {cores} cores, torch {torch}".format(**floor.environment)
        rows.append([where, floor.title, *(f"{100 * floor.of('step_s', k):.1f} %" for k in SHOWN_PAIRS)])
    stdout_console().print(Grid(header, rows, left=2))
