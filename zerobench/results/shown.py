"""Display of runs in a notebook or at a prompt: text that fits a terminal, or HTML with a figure.

The figures are those of a sweep's table. Names and reasons from a run's folder may contain anything; they are escaped.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from ..host.terminal import Output
from ..records import CATEGORIES
from ..sizes import counted, printable, show_bytes, show_count, show_ms
from .frames import records_of
from .grid import Grid
from .markup import Bar, BarFigure, BarPart, render
from .printed_table import FIRST_TO_GO, Row, best_rows, columns_of, grid_of, sorted_cells, step_interval
from .summary import busy_words

NONE = "–"

MOST_CELLS = 20
"""Most rows that are shown."""

LAST_TO_GO = ("volume ψ", "states MiB", "tokens/s", "samples/s")
"""Columns that an even narrower terminal drops, after those in FIRST_TO_GO."""

UNITS = {"formula": "formula MiB", "predicted": "predicted MiB", "95 % interval": "95 % interval ms"}
"""Column of the sweep's table -> its name with a unit, for columns whose neighbor does not show it."""

SIDES = tuple(f'style="text-align:{side};white-space:nowrap"' for side in ("left", "right"))
"""Attributes of cells of words and of figures."""


def text_of(runs: pd.DataFrame) -> str:
    """Returns a heading, a line per cell with as many columns as fit, and the number of further cells."""
    if runs.empty:
        return "Results: no runs."
    cells = sorted_cells(records_of(runs))
    shown = cells[:MOST_CELLS]
    grid = replace(grid_of(shown, columns_of(shown), sign=""), first_to_go=(*FIRST_TO_GO, *LAST_TO_GO), hints=False)
    # in a notebook rich would display what it prints, captured or not
    console = Output(width=shutil.get_terminal_size().columns, color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(grid)
    lines = [_heading(runs, len(cells)), *(line.rstrip() for line in captured.get().splitlines())]
    lines += [f"... and {show_count(len(cells) - len(shown), 'cell')} more in .runs"] * (len(cells) > len(shown))
    return "\n".join([*lines, *_folded(_failures(shown))])


def html_of(runs: pd.DataFrame) -> str:
    """Returns a table of the cells, the reasons of failures, and a figure of the peaks."""
    if runs.empty:
        return "<p>Results: no runs.</p>"
    cells = sorted_cells(records_of(runs))
    shown = cells[:MOST_CELLS]
    columns = columns_of(shown)
    more = len(cells) - len(shown)
    notes = [f"{show_count(more, 'cell')} more in .runs."] * bool(more)
    if any(best_rows(shown, column) for column in columns.values()):
        notes.append("Bold: the best of the strategies that train the same thing.")
    notes += filter(None, [busy_words(shown)])
    grid = grid_of(shown, columns, sign="")
    return _html(_heading(runs, len(cells)), replace(grid, header=[UNITS.get(n, n) for n in grid.header]), notes, shown)


def text_of_run(runs: pd.DataFrame) -> str:
    """Returns the title of the only run, and its figures with their predictions, one per line."""
    cells = sorted_cells(records_of(runs))
    figures, columns = _figures_of(cells[0]), shutil.get_terminal_size().columns
    width = max((len(name) for name, *_ in figures), default=0)
    lines = [f"  {name:<{width}}  {value:>12}" + f"  {beside}" * bool(beside) for name, value, beside in figures]
    cut = [line if len(line) <= columns else f"{line[: columns - 1]}…" for line in lines]
    return "\n".join([*_folded([_title(cells[0]), *_failures(cells)]), *cut])


def html_of_run(runs: pd.DataFrame) -> str:
    """Returns the figures of the only run next to their predictions, and its peak by category."""
    cells = sorted_cells(records_of(runs))
    rows = [[name.strip(), value, beside] for name, value, beside in _figures_of(cells[0])]
    return _html(_title(cells[0]), Grid(["figure", "value", ""], rows, ("figure", "")) if rows else None, [], cells)


def _heading(runs: pd.DataFrame, cells: int) -> str:
    """Formats "4 runs of 2 cells, 1 not ok, on cpu and cuda, whose times are not comparable"."""
    parts = [f"{show_count(len(runs), 'run')} of {show_count(cells, 'cell')}"]
    parts += [f"{count} not ok"] if (count := int((runs["status"] != "ok").sum())) else []
    devices = sorted(set(runs["device"].dropna()))
    parts += [f"on {' and '.join(devices)}, whose times are not comparable"] if len(devices) > 1 else []
    return f"Results: {', '.join(parts)}"


def _title(cell: Row) -> str:
    return printable(f"Run {cell['name']}: {cell['status']} ({cell['run_id']})")


def _failures(cells: Sequence[Row]) -> list[str]:
    return [
        printable(f"{cell['name']}: {cell['status']}: {cell['reason']}") for cell in cells if cell["status"] != "ok"
    ]


def _folded(sentences: Sequence[str]) -> list[str]:
    width = shutil.get_terminal_size().columns
    return [line for sentence in sentences for line in textwrap.wrap(sentence, width, subsequent_indent="  ")]


def _figures_of(row: Row) -> list[tuple[str, str, str]]:
    """Returns name, value with its unit, and a comment, for each figure that a run has."""
    states, volume = show_bytes(row["predicted_states_bytes"]), _number(row["predicted_volume_psi"], ".3f", " ψ")
    rows = [
        ("peak", show_bytes(row["peak_bytes"]), "on the rank with the most"),
        *((f"  {name}", show_bytes(row[f"peak_{name}_bytes"]), "") for name in CATEGORIES),
        ("states", show_bytes(row["states_bytes"]), f"predicted {states}" if states != NONE else ""),
        ("volume", _number(row["volume_psi"], ".3f", " ψ"), f"predicted {volume}" if volume != NONE else ""),
        ("step", show_ms(row["step_s"]), step_interval(row)),
        (f"{counted([row['sequence']])}/s", _number(row["tokens_per_s"], ".0f"), ""),
        ("last loss", _number(row["loss_last"], ".4f"), str(row["training_words"] or "")),
    ]
    return [figure for figure in rows if figure[1] not in (NONE, "0 B")]


def _number(value: Any, form: str, unit: str = "") -> str:
    return NONE if pd.isna(value) else f"{value:{form}}{unit}"


def _html(heading: str, grid: Grid | None, notes: Sequence[str], cells: Sequence[Row]) -> str:
    figure = BarFigure("Memory at the peak by category, on the rank with the most", "", [_bar(cell) for cell in cells])
    values = {"heading": heading, "grid": grid, "notes": notes, "failures": _failures(cells), "figure": figure}
    return render("results/notebook.html", sides=SIDES, **values)


def _bar(cell: Row) -> Bar:
    sizes = {name: cell[f"peak_{name}_bytes"] for name in CATEGORIES} if cell["status"] == "ok" else {}
    measured = {name: int(size) for name, size in sizes.items() if not pd.isna(size)}
    parts = [BarPart(name, size, f"{cell['name']}: {name} {show_bytes(size)}") for name, size in measured.items()]
    absent = "" if measured else cell["status"] if cell["status"] != "ok" else "not measured"
    text = absent or show_bytes(sum(measured.values()))
    return Bar(cell["name"], text, f"{cell['name']}: {text}", parts, absent=absent)
