"""Results and a run as text that fits a terminal: what `repr` shows. The figures are those of a sweep's table."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..records import CATEGORIES
from ..sizes import printable, show_bytes, show_count, show_ms
from .printed_table import COLUMNS, FIRST_TO_GO, Column, Row, sorted_cells

if TYPE_CHECKING:
    from .tables import Results, Run

MOST_CELLS = 20
"""Rows shown at most."""

LAST_TO_GO = ("volume ψ", "states MiB", "tokens/s")
"""Columns that go after those of FIRST_TO_GO, where a terminal is narrower still."""


def text_of(results: Results) -> str:
    """Returns a heading, a line per cell with as many columns as fit, and how many more there are."""
    if results.runs.empty:
        return "Results: no runs."
    cells = cells_of(results)
    shown = cells[:MOST_CELLS]
    lines = [heading(results, len(cells)), "", *_table(shown, shutil.get_terminal_size().columns)]
    lines += [f"... and {show_count(len(cells) - len(shown), 'cell')} more in .runs"] * (len(cells) > len(shown))
    return "\n".join([*lines, *_folded(failures(shown))])


def text_of_run(run: Run) -> str:
    """Returns what was run, and its figures with their predictions, a line each."""
    words, figures = title_of(run), figures_of(run)
    width = max((len(name) for name, *_ in figures), default=0)
    lines = [f"  {name:<{width}}  {value:>12}" + f"  {beside}" * bool(beside) for name, value, beside in figures]
    return "\n".join([*_folded([f"Run {words}", *failures(cells_of(run))]), *_cut(lines)])


def cells_of(results: Results) -> list[Row]:
    """Returns the rows of the table: a cell each, named, as `zerobench status` orders them."""
    return sorted_cells(results.runs.astype("object").where(results.runs.notna(), None).to_dict("records"))  # type: ignore[arg-type]


def heading(results: Results, cells: int) -> str:
    """Formats "4 runs of 2 cells, 1 not ok, devices cpu and cuda"."""
    runs = results.runs
    words = [f"{show_count(len(runs), 'run')} of {show_count(cells, 'cell')}"]
    words += [f"{count} not ok"] if (count := int((runs["status"] != "ok").sum())) else []
    devices = sorted(set(runs["device"].dropna()))
    words += [f"on {' and '.join(devices)}, whose times are not comparable"] if len(devices) > 1 else []
    return f"Results: {', '.join(words)}"


def columns_of(cells: Sequence[Row]) -> dict[str, Column]:
    """Returns the columns of the sweep's table that any of the cells makes worth their width."""
    return {name: column for name, column in COLUMNS.items() if any(column.there(cell) for cell in cells)}


def failures(cells: Sequence[Row]) -> list[str]:
    """Returns a sentence for each cell that is not ok."""
    return [printable(f"{one['name']}: {one['status']}: {one['reason']}") for one in cells if one["status"] != "ok"]


def _folded(sentences: Sequence[str]) -> list[str]:
    width = shutil.get_terminal_size().columns
    return [line for sentence in sentences for line in textwrap.wrap(sentence, width, subsequent_indent="  ")]


def title_of(run: Run) -> str:
    """Formats a run's cell, status and id."""
    [cell] = cells_of(run)
    return f"{cell['name']}: {cell['status']} ({cell['run_id']})"


def figures_of(run: Run) -> list[tuple[str, str, str]]:
    """Returns name, value with its unit, and what stands beside it, of the figures that a run has."""
    row: Any = run.row
    low, high = row["step_s_low"], row["step_s_high"]
    interval = "" if pd.isna(low) else f"95 % interval {low * 1000:.1f} to {high * 1000:.1f} ms"
    rows = [("peak", _bytes(row["peak_bytes"]), "on the fullest rank")]
    rows += [(f"  {name}", _bytes(row[f"peak_{name}_bytes"]), "") for name in CATEGORIES]
    rows += [
        ("states", _bytes(row["states_bytes"]), _predicted(_bytes(row["predicted_states_bytes"]))),
        ("volume", _psi(row["volume_psi"]), _predicted(_psi(row["predicted_volume_psi"]))),
        ("step", "" if pd.isna(row["step_s"]) else show_ms(row["step_s"]), interval),
        ("tokens/s", "" if pd.isna(row["tokens_per_s"]) else f"{row['tokens_per_s']:.0f}", ""),
        ("last loss", "" if pd.isna(row["loss_last"]) else f"{row['loss_last']:.4f}", str(row["training_words"] or "")),
    ]
    return [one for one in rows if one[1] and one[1] != "0 B"]


def _bytes(size: Any) -> str:
    return "" if pd.isna(size) else show_bytes(int(size))


def _psi(volume: Any) -> str:
    return "" if pd.isna(volume) else f"{volume:.3f} ψ"


def _predicted(words: str) -> str:
    return f"predicted {words}" if words else ""


def _table(cells: Sequence[Row], width: int) -> list[str]:
    """Returns aligned lines; columns go, FIRST_TO_GO first, until the widest line fits."""
    columns = columns_of(cells)
    for name in (*FIRST_TO_GO, *LAST_TO_GO, ""):
        lines = _aligned([["cell", "status", *columns], *([*_start(cell), *_shown(cell, columns)] for cell in cells)])
        if len(lines[0]) <= width or not name:
            break
        columns.pop(name, None)
    return _cut(lines)


def _cut(lines: Sequence[str]) -> list[str]:
    width = shutil.get_terminal_size().columns
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def _start(cell: Row) -> list[str]:
    return [printable(cell["name"]), cell["status"] + (f" ×{cell['launches']}" if cell["launches"] > 1 else "")]


def _shown(cell: Row, columns: dict[str, Column]) -> list[str]:
    return [column.show(cell) if cell["status"] == "ok" else "–" for column in columns.values()]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<", "<", *(">" for _ in widths[2:])]
    shape = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    return [shape.format(*row) for row in rows]
