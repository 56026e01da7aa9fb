"""HTML elements, and bars as SVG, for the page of a report and for results in a notebook.

*Html* is text that is already markup; every other object is shown as its text, escaped, so that nothing from a run's
folder becomes markup.

A *bar* is a row of a figure: a label and a text above, a thick line of *parts*, and a thin one below it. Lengths are in
the unit of the values, on one scale per figure. Each part has its own color and pattern (records/palette.py). Bars
adopt a page's colors, show their values on hover, focus and touch, and can be printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from ..records.palette import CATEGORIES, COLLECTIVES, PHASES, Fills
from ..sizes import printable
from .grid import Grid

VOID = ("meta", "input", "br", "rect", "line", "circle", "path", "use")
"""Elements without content."""


class Html(str):
    """Markup, which is not escaped again."""


def h(name: str, /, *inside: object, **attributes: object) -> Html:
    """Builds an element. `data_tip=` is the attribute data-tip, `class_=` is class; None and False omit one."""
    words = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID and not inside:
        return Html(f"<{name}{words}>" if name in ("meta", "input", "br") else f"<{name}{words}/>")
    return Html(f"<{name}{words}>{join(inside)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Html:
    """Concatenates parts, escaping those that are not markup."""
    return Html(between.join(part if isinstance(part, Html) else escape(_plain(part)) for part in parts))


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(_plain(value))}"'


def _plain(value: object) -> str:
    return "\n".join(map(printable, str(value).split("\n")))


def grid(one: Grid, caption: str | None = None) -> Html:
    """Builds a table in a box with its own scrolling: a wide table never widens the page."""
    name = caption or f"table of {', '.join(filter(None, one.header))}"
    return h("div", Html(one.html()), class_="box", role="region", tabindex=0, aria_label=name)


def parts(told: Iterable[str | Grid]) -> Html:
    """Builds paragraphs and tables."""
    return join(grid(part) if isinstance(part, Grid) else h("p", part) for part in told)


def listing(lines: Iterable[object]) -> Html:
    """Builds lines of a log or of commands, unchanged."""
    return h("pre", h("code", "\n".join(map(str, lines))), tabindex=0)


def details(summary: object, inside: Html, lazy: bool, **attributes: object) -> Html:
    """Builds a collapsible part. `lazy`: its content stays text until it is opened, which costs a browser nothing."""
    held = h("script", Html(inside), type="text/html") if lazy else inside
    return h("details", h("summary", summary), held, **attributes)


WIDTH, ROW = 360.0, 50.0
LABEL, THICK, THIN = 12.0, 17.0, 32.0
"""Offsets in a row: the baseline of its text, the top of the thick line and of the thin one."""

TEXT: dict[str, object] = {"font_size": 12, "fill": "currentColor"}
MARK: dict[str, object] = {"stroke": "currentColor", "stroke_width": 2, "class_": "mark"}
ABSENT: dict[str, object] = {"stroke": "currentColor", "stroke_dasharray": "3 4", "class_": "absent"}
"""Attributes of texts and lines, which a page's style may override."""

FILLS: Fills = {**CATEGORIES, **COLLECTIVES, **PHASES, "step": ("#0072B2", ""), "states": ("#999999", "")}
"""All parts that bars have: names are unique across the figures."""

HATCHES = {
    "//": "M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4",
    "\\\\": "M-2,6 l4,4 M0,0 l8,8 M6,-2 l4,4",
    "++": "M0,4 h8 M4,0 v8",
    "xx": "M0,0 l8,8 M0,8 l8,-8",
    "--": "M0,4 h8",
    "..": "M3,4 h2",
}
"""Hatch in matplotlib's notation -> strokes of a tile of 8 by 8."""


@dataclass(frozen=True)
class BarPart:
    """A part of a bar; `told`: its tooltip; `value`: its length."""

    name: str
    value: float
    told: str


@dataclass(frozen=True)
class Bar:
    """A row. `mark`: the prediction; `reach`: the ends of an interval; `absent`: shown if there are no `pieces`."""

    label: str
    text: str
    told: str
    pieces: Sequence[BarPart] = ()
    below: Sequence[BarPart] = ()
    mark: float | None = None
    reach: tuple[float, float] | None = None
    absent: str = ""


def patterns() -> Html:
    """Builds the patterns for all figures of a page, in an invisible element."""
    made = [
        h("pattern",
          h("rect", width=8, height=8, fill=color),
          h("path", d=HATCHES[hatch], stroke="#fff", stroke_width=2.2 if hatch == ".." else 1.1, fill="none",
            stroke_linecap="round") if hatch else "",
          id=f"fill-{name}", width=8, height=8, patternUnits="userSpaceOnUse")
        for name, (color, hatch) in FILLS.items()
    ]  # fmt: skip
    return h("svg", h("defs", *made), width=0, height=0, style="position:absolute", aria_hidden="true", class_="defs")


def figure(rows: Sequence[Bar], name: str) -> str:
    """Builds bars that stand alone, without a page's style and script, including patterns and a legend."""
    there = {piece.name for row in rows for piece in row.pieces if piece.value > 0}
    return h("div", patterns(), bars(rows, name, titles=True), legend([part for part in FILLS if part in there]))


def bars(rows: Sequence[Bar], name: str, titles: bool = False) -> Html:
    """Builds a figure of rows. `name`: its subject, for screen readers. `titles`: the browser shows the tooltips of
    parts; otherwise the page's script does.
    """
    style = {"xmlns": "http://www.w3.org/2000/svg", "style": "width:100%;max-width:40rem"} if titles else {}
    return _svg(rows, name, 0.0, titles, **style)


def deltas(rows: Sequence[Bar], name: str) -> Html:
    """Builds a figure of differences: positive pieces to the right of the middle, negative ones to the left. `name`:
    its subject, for screen readers.
    """
    return _svg(rows, name, WIDTH / 2)


def _svg(rows: Sequence[Bar], name: str, zero: float, titles: bool = False, **style: object) -> Html:
    """Builds the figure. `zero`: the x of values of 0."""
    scale = (WIDTH - zero) / (max(map(_farthest, rows), default=0.0) or 1.0)
    drawn = [_row(row, place, zero, scale, titles) for place, row in enumerate(rows)]
    return h("svg", *drawn, viewBox=f"0 0 {WIDTH:g} {ROW * len(rows):g}", role="group", aria_label=name, **style)


def _farthest(row: Bar) -> float:
    sums = [
        abs(sum(piece.value for piece in line if piece.value * way > 0))
        for line in (row.pieces, row.below)
        for way in (1, -1)
    ]
    return max(*sums, row.mark or 0.0, *map(abs, row.reach or (0.0,)))


def _row(row: Bar, place: int, zero: float, scale: float, titles: bool) -> Html:
    parts = _text(row.label, row.text)
    if row.absent:
        parts.append(h("line", x1=0, x2=WIDTH, y1=THICK + 6, y2=THICK + 6, **ABSENT))
    less = [replace(piece, value=-piece.value) for piece in reversed(row.pieces) if piece.value < 0]
    parts += _line(less, THICK, 12, scale, zero - scale * sum(piece.value for piece in less), titles)
    parts += [*_line(row.pieces, THICK, 12, scale, zero, titles), *_line(row.below, THIN, 5, scale)]
    if zero:
        parts.append(h("line", x1=zero, x2=zero, y1=THICK - 3, y2=THICK + 15, **MARK))
    if row.mark is not None:
        x = min(row.mark * scale, WIDTH - 1)
        parts.append(h("line", x1=f"{x:.2f}", x2=f"{x:.2f}", y1=THIN - 2, y2=THIN + 7, **MARK))
    if row.reach is not None:
        parts.append(_whisker(*(zero + end * scale for end in row.reach)))
    return _focused(parts, place, row.told)


def _text(label: str, text: str) -> list[Html]:
    return [
        h("text", _cut(label, 58 - len(text)), x=0, y=LABEL, **TEXT, class_="label"),
        h("text", text, x=WIDTH, y=LABEL, **TEXT, text_anchor="end", class_="value"),
        h("rect", x=0, y=0, width=WIDTH, height=ROW, fill="transparent", class_="hit"),
    ]


def _focused(parts: Sequence[Html], place: int, told: str) -> Html:
    move, said = f"translate(0 {place * ROW:g})", ", ".join(told.split("\n"))
    return h("g", *parts, transform=move, tabindex=0, role="img", aria_label=said, data_tip=told, class_="bar")


def _line(
    pieces: Sequence[BarPart], top: float, height: float, scale: float, start: float = 0.0, titles: bool = False
) -> list[Html]:
    drawn, at = [], start
    for piece in pieces:
        if piece.value <= 0:
            continue
        fill = f"url(#fill-{piece.name})"
        drawn.append(
            h("rect", *[h("title", piece.told)] * titles, x=f"{at:.2f}", y=top, width=f"{piece.value * scale:.2f}",
              height=height, fill=fill, data_tip=piece.told, data_part=piece.name, data_value=repr(piece.value))
        )  # fmt: skip
        at += piece.value * scale
    return drawn


def _whisker(low: float, high: float) -> Html:
    y = THICK + 6
    d = f"M{low:.2f},{y} H{high:.2f} M{low:.2f},{y - 4} v8 M{high:.2f},{y - 4} v8"
    return h("path", d=d, stroke="currentColor", fill="none", class_="whisker")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def legend(names: Sequence[str], *lines: Html) -> Html:
    """Builds the legend for the parts of a figure; `lines`: further entries."""
    entries = [h("li", swatch(name), name.replace("_", "-")) for name in names]
    return h("ul", *entries, join(lines), class_="legend")


def swatch(name: str) -> Html:
    """Builds the color sample of a part."""
    return h("svg", h("rect", width=14, height=12, fill=f"url(#fill-{name})"), width=14, height=12, aria_hidden="true")
