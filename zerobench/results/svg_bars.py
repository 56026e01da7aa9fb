"""Stacked bars as inline SVG: small, without a script, in the colors and hatches of figures, on light and dark pages.

A *row* is a label, the sizes of its parts in bytes, and a word for the place of a bar where there is none. Numbers and
labels take the page's own color; hovering over a part gives its name and size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from zlib import crc32

from ..records.palette import Fills
from ..sizes import show_bytes

WIDTH, LINE, BAR = 760, 22, 14
"""Of the figure, of a line and of a bar, in CSS pixels."""

LETTER, NUMBER = 6.6, 80
"""Widths in pixels: of a letter at 12 px, about; of the number behind a bar."""

SIGNS = {
    "/": "M0 6L6 0M-1.5 1.5L1.5 -1.5M4.5 7.5L7.5 4.5",
    "\\": "M0 0L6 6M-1.5 4.5L1.5 7.5M4.5 -1.5L7.5 1.5",
    "x": "M0 0L6 6M6 0L0 6",
    "+": "M3 0V6M0 3H6",
    "-": "M0 3H6",
    ".": "M2.4 3A.6 .6 0 1 0 3.6 3A.6 .6 0 1 0 2.4 3",
}
"""matplotlib's sign of a hatch -> its path in a tile of 6 by 6."""


@dataclass(frozen=True)
class Row:
    """One bar: `parts` is name -> bytes, `word` what stands there without any."""

    label: str
    parts: Mapping[str, int]
    word: str = ""


def bars(rows: Sequence[Row], fills: Fills, title: str) -> str:
    """Returns an svg element: the rows' bars on one scale, their sums, and a legend of the parts that there are."""
    named = max((len(row.label) for row in rows), default=0) * LETTER + 8
    left = min(named, WIDTH * 0.45)
    most = max((sum(row.parts.values()) for row in rows), default=0)
    scale = (WIDTH - left - NUMBER) / most if most else 0.0
    mark = f"zb{crc32(repr((rows, title)).encode()):08x}"
    used = {name: fills[name] for name in fills if any(row.parts.get(name) for row in rows)}
    lines = [_line(row, LINE * number, left, scale, fills, mark) for number, row in enumerate(rows)]
    legend, high = _legend(used, LINE * len(rows) + 6, mark)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" width="{WIDTH}" '
        f'height="{high}" viewBox="0 0 {WIDTH} {high}" style="max-width:100%;height:auto;font:12px sans-serif" '
        f'fill="currentColor"><title>{escape(title)}</title><defs>{_patterns(used, mark)}</defs>'
        f"{''.join(lines)}{legend}</svg>"
    )


def _line(row: Row, top: int, left: float, scale: float, fills: Fills, mark: str) -> str:
    base = top + LINE - 8
    fits = int((left - 8) / LETTER)
    label = row.label if len(row.label) <= fits else f"{row.label[: fits - 1]}…"
    parts = [f'<text x="{left - 6:.1f}" y="{base}" text-anchor="end">{escape(label)}</text>']
    x = left
    for name, size in row.parts.items():
        if wide := size * scale:
            told = escape(f"{row.label}: {name} {show_bytes(size)}")
            box = f'x="{x:.2f}" y="{top + 3}" width="{wide:.2f}" height="{BAR}"'
            parts.append(f'<rect {box} {_fill(name, fills, mark)} stroke="#fff" stroke-width=".5">')
            parts.append(f"<title>{told}</title></rect>")
        x += wide
    words = show_bytes(sum(row.parts.values())) if row.parts else row.word
    return "".join(parts) + f'<text x="{x + 5:.1f}" y="{base}">{escape(words)}</text>'


def _legend(used: Fills, top: int, mark: str) -> tuple[str, int]:
    """Returns the swatches with their names, in as many lines as they need, and where they end."""
    parts, x = [], 0.0
    for name in used:
        wide = 22 + len(name) * LETTER + 12
        if x + wide > WIDTH:
            x, top = 0.0, top + LINE
        parts.append(f'<rect x="{x:.1f}" y="{top + 2}" width="16" height="12" {_fill(name, used, mark)}/>')
        parts.append(f'<text x="{x + 21:.1f}" y="{top + 12}">{escape(name)}</text>')
        x += wide
    return "".join(parts), top + LINE


def _fill(name: str, fills: Fills, mark: str) -> str:
    color, hatch = fills[name]
    return f'fill="url(#{mark}-{escape(name)})"' if hatch else f'fill="{color}"'


def _patterns(fills: Fills, mark: str) -> str:
    return "".join(
        f'<pattern id="{mark}-{escape(name)}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{color}"/><path d="{SIGNS[hatch[0]]}" stroke="#fff" stroke-width=".8"/>'
        "</pattern>"
        for name, (color, hatch) in fills.items()
        if hatch
    )
