"""Results and a run as HTML for a notebook: a table with units, and a figure of the peaks by category.

Everything that comes from a run's folder is escaped: names and reasons may hold whatever wrote them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from typing import TYPE_CHECKING

import pandas as pd

from ..records import CATEGORIES, palette
from ..sizes import show_count
from .in_text import MOST_CELLS, cells_of, columns_of, failures, figures_of, heading, title_of
from .printed_table import Row, best_rows

if TYPE_CHECKING:
    from .tables import Results, Run
from .summary import busy_words
from .svg_bars import Row as Bar
from .svg_bars import bars

UNITS = {"formula": "formula MiB", "predicted": "predicted MiB", "95 % interval": "95 % interval ms"}
"""Column of the sweep's table -> what it is called where it does not stand beside one that names its unit."""

BEST = "Bold: the best of the strategies that train the same thing."
FIGURE = "Memory at the peak on the fullest rank, by category"


def html_of(results: Results) -> str:
    """Returns a table of the cells, why some are not ok, and a figure of their peaks."""
    if results.runs.empty:
        return "<p>Results: no runs.</p>"
    cells = cells_of(results)
    shown = cells[:MOST_CELLS]
    more = len(cells) - len(shown)
    words = [f"{show_count(more, 'cell')} more in <code>.runs</code>."] * bool(more)
    best = {name: best_rows(shown, column) for name, column in columns_of(shown).items()}
    words += [BEST] * any(best.values())
    if busy := busy_words(shown):
        words.append(escape(busy))
    return _block(heading(results, len(cells)), [_table(shown, best), _note(words), _failed(shown), _figure(shown)])


def html_of_run(run: Run) -> str:
    """Returns a run's figures beside their predictions, and its peak by category."""
    cells = cells_of(run)
    rows = [[escape(name.strip()), escape(value), escape(beside)] for name, value, beside in figures_of(run)]
    table = _rows(["figure", "value", ""], rows, {0, 2}) if rows else ""
    return _block(f"Run {title_of(run)}", [table, _failed(cells), _figure(cells)])


def _block(head: str, parts: Sequence[str]) -> str:
    return f"<div><p><strong>{escape(head)}</strong></p>{''.join(parts)}</div>"


def _table(cells: Sequence[Row], best: dict[str, set[int]]) -> str:
    columns = columns_of(cells)
    rows = []
    for place, cell in enumerate(cells):
        status = cell["status"] + (f" ×{cell['launches']}" if cell["launches"] > 1 else "")
        shown = [escape(column.show(cell)) if cell["status"] == "ok" else "–" for column in columns.values()]
        marked = [
            f"<strong>{text}</strong>" if place in best[name] else text
            for name, text in zip(columns, shown, strict=True)
        ]
        rows.append([escape(cell["name"]), escape(status), *marked])
    return _rows(["cell", "status", *(escape(UNITS.get(name, name)) for name in columns)], rows, {0, 1})


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """Returns a table of HTML; columns with the numbers `left` to the left, the others to the right."""
    sides = [f"{'left' if number in left else 'right'};white-space:nowrap" for number in range(len(header))]
    head = "".join(
        f'<th scope="col" style="text-align:{side}">{name}</th>' for side, name in zip(sides, header, strict=True)
    )
    lines = [
        "".join(f'<td style="text-align:{side}">{text}</td>' for side, text in zip(sides, row, strict=True))
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div style="overflow-x:auto">{table}</div>'


def _note(words: Sequence[str]) -> str:
    return f"<p><small>{' '.join(words)}</small></p>" if words else ""


def _failed(cells: Sequence[Row]) -> str:
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in failures(cells))
    return f"<ul>{sentences}</ul>" if sentences else ""


def _figure(cells: Sequence[Row]) -> str:
    rows = [_bar(cell) for cell in cells]
    return f"<p>{FIGURE}:</p>{bars(rows, palette.CATEGORIES, FIGURE)}" if any(row.parts for row in rows) else ""


def _bar(cell: Row) -> Bar:
    if cell["status"] != "ok":
        return Bar(cell["name"], {}, cell["status"])
    sizes = {name: cell[f"peak_{name}_bytes"] for name in CATEGORIES}
    known = {name: int(size) for name, size in sizes.items() if not pd.isna(size)}
    return Bar(cell["name"], known, "" if known else "not measured")
