"""Display of results and of a run in a notebook or at a prompt: text that fits a terminal, or HTML with a figure.

The figures are those of a sweep's table. Everything from a run's folder is escaped in HTML: names and reasons may
contain anything.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..host.terminal import Output
from ..records import CATEGORIES
from ..sizes import counted, printable, show_bytes, show_count, show_ms
from .frames import records_of
from .grid import Grid
from .markup import Bar, BarPart, figure
from .printed_table import FIRST_TO_GO, Row, best_rows, columns_of, grid_of, sorted_cells
from .summary import busy_words

if TYPE_CHECKING:
    from .tables import Results, Run

MOST_CELLS = 20
"""Most rows that are shown."""

LAST_TO_GO = ("volume ψ", "states MiB", "tokens/s", "samples/s")
"""Columns that an even narrower terminal drops, after those in FIRST_TO_GO."""


def text_of(results: Results) -> str:
    """Returns a heading, a line per cell with as many columns as fit, and the number of further cells."""
    if results.runs.empty:
        return "Results: no runs."
    cells = cells_of(results)
    shown = cells[:MOST_CELLS]
    lines = [heading(results, len(cells)), *_drawn(shown)]
    lines += [f"... and {show_count(len(cells) - len(shown), 'cell')} more in .runs"] * (len(cells) > len(shown))
    return "\n".join([*lines, *_folded(failures(shown))])


def text_of_run(run: Run) -> str:
    """Returns the run's title, and its figures with their predictions, one per line."""
    words, figures = title_of(run), figures_of(run)
    width = max((len(name) for name, *_ in figures), default=0)
    lines = [f"  {name:<{width}}  {value:>12}" + f"  {beside}" * bool(beside) for name, value, beside in figures]
    return "\n".join([*_folded([f"Run {words}", *failures(cells_of(run))]), *_cut(lines)])


def cells_of(results: Results) -> list[Row]:
    """Returns the rows of the table: one per cell, named, ordered as in `zerobench status`."""
    return sorted_cells(records_of(results.runs))


def heading(results: Results, cells: int) -> str:
    """Formats "4 runs of 2 cells, 1 not ok, devices cpu and cuda"."""
    runs = results.runs
    words = [f"{show_count(len(runs), 'run')} of {show_count(cells, 'cell')}"]
    words += [f"{count} not ok"] if (count := int((runs["status"] != "ok").sum())) else []
    devices = sorted(set(runs["device"].dropna()))
    words += [f"on {' and '.join(devices)}, whose times are not comparable"] if len(devices) > 1 else []
    return f"Results: {', '.join(words)}"


def failures(cells: Sequence[Row]) -> list[str]:
    """Returns an error message for each cell that is not ok."""
    return [printable(f"{one['name']}: {one['status']}: {one['reason']}") for one in cells if one["status"] != "ok"]


def _folded(sentences: Sequence[str]) -> list[str]:
    width = shutil.get_terminal_size().columns
    return [line for sentence in sentences for line in textwrap.wrap(sentence, width, subsequent_indent="  ")]


def title_of(run: Run) -> str:
    """Formats a run's cell, status and id."""
    [cell] = cells_of(run)
    return printable(f"{cell['name']}: {cell['status']} ({cell['run_id']})")


def figures_of(run: Run) -> list[tuple[str, str, str]]:
    """Returns name, value with its unit, and a comment, for each figure that a run has."""
    row: Any = run.row
    low, high = row["step_s_low"], row["step_s_high"]
    interval = "" if pd.isna(low) else f"95 % interval {low * 1000:.1f} to {high * 1000:.1f} ms"
    rows = [("peak", _bytes(row["peak_bytes"]), "on the rank with the most")]
    rows += [(f"  {name}", _bytes(row[f"peak_{name}_bytes"]), "") for name in CATEGORIES]
    rows += [
        ("states", _bytes(row["states_bytes"]), _predicted(_bytes(row["predicted_states_bytes"]))),
        ("volume", _psi(row["volume_psi"]), _predicted(_psi(row["predicted_volume_psi"]))),
        ("step", "" if pd.isna(row["step_s"]) else show_ms(row["step_s"]), interval),
        (f"{counted([row['sequence']])}/s", "" if pd.isna(row["tokens_per_s"]) else f"{row['tokens_per_s']:.0f}", ""),
        ("last loss", "" if pd.isna(row["loss_last"]) else f"{row['loss_last']:.4f}", str(row["training_words"] or "")),
    ]
    return [one for one in rows if one[1] and one[1] != "0 B"]


def _bytes(size: Any) -> str:
    return "" if pd.isna(size) else show_bytes(int(size))


def _psi(volume: Any) -> str:
    return "" if pd.isna(volume) else f"{volume:.3f} ψ"


def _predicted(words: str) -> str:
    return f"predicted {words}" if words else ""


def _drawn(cells: list[Row]) -> list[str]:
    """Returns the lines of the table, with as many columns as fit the terminal."""
    grid = replace(grid_of(cells, columns_of(cells), sign=""), first_to_go=(*FIRST_TO_GO, *LAST_TO_GO), hints=False)
    # in a notebook rich would display what it prints, captured or not
    console = Output(width=shutil.get_terminal_size().columns, color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(grid)
    return [line.rstrip() for line in captured.get().splitlines()]


def _cut(lines: Sequence[str]) -> list[str]:
    width = shutil.get_terminal_size().columns
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]


UNITS = {"formula": "formula MiB", "predicted": "predicted MiB", "95 % interval": "95 % interval ms"}
"""Column of the sweep's table -> its name with a unit, for columns whose neighbor does not show it."""

BEST = "Bold: the best of the strategies that train the same thing."
FIGURE = "Memory at the peak by category, on the rank with the most"
SIDES = tuple(f' style="text-align:{side};white-space:nowrap"' for side in ("left", "right"))
"""Attributes of cells of words and of figures."""


def html_of(results: Results) -> str:
    """Returns a table of the cells, the reasons of failures, and a figure of the peaks."""
    if results.runs.empty:
        return "<p>Results: no runs.</p>"
    cells = cells_of(results)
    shown = cells[:MOST_CELLS]
    more = len(cells) - len(shown)
    words = [f"{show_count(more, 'cell')} more in <code>.runs</code>."] * bool(more)
    columns = columns_of(shown)
    words += [BEST] * any(best_rows(shown, column) for column in columns.values())
    if busy := busy_words(shown):
        words.append(escape(busy))
    grid = grid_of(shown, columns, sign="")
    grid = replace(grid, header=[UNITS.get(name, name) for name in grid.header])
    note = f"<p><small>{' '.join(words)}</small></p>" if words else ""
    return _block(heading(results, len(cells)), [_scrolled(grid), note, _failed(shown), _figure(shown)])


def html_of_run(run: Run) -> str:
    """Returns a run's figures next to their predictions, and its peak by category."""
    cells = cells_of(run)
    rows = [[name.strip(), value, next_to_it] for name, value, next_to_it in figures_of(run)]
    table = _scrolled(Grid(["figure", "value", ""], rows, ("figure", ""))) if rows else ""
    return _block(f"Run {title_of(run)}", [table, _failed(cells), _figure(cells)])


def _block(head: str, parts: Sequence[str]) -> str:
    return f"<div><p><strong>{escape(head)}</strong></p>{''.join(parts)}</div>"


def _scrolled(grid: Grid) -> str:
    return f'<div style="overflow-x:auto">{grid.html(*SIDES)}</div>'


def _failed(cells: Sequence[Row]) -> str:
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in failures(cells))
    return f"<ul>{sentences}</ul>" if sentences else ""


def _figure(cells: Sequence[Row]) -> str:
    rows = [_bar(cell) for cell in cells]
    return f"<p>{FIGURE}:</p>{figure(rows, FIGURE)}" if any(row.pieces for row in rows) else ""


def _bar(cell: Row) -> Bar:
    name, known = cell["name"], {}
    if cell["status"] == "ok":
        sizes = {part: cell[f"peak_{part}_bytes"] for part in CATEGORIES}
        known = {part: int(size) for part, size in sizes.items() if not pd.isna(size)}
    word = cell["status"] if cell["status"] != "ok" else "not measured"
    pieces = [BarPart(part, size, f"{name}: {part} {show_bytes(size)}") for part, size in known.items()]
    text = show_bytes(sum(known.values())) if known else word
    return Bar(name, text, f"{name}: {text}", pieces, absent="" if known else word)
