"""HTML from templates, for the page of a report and for results in a notebook.

What a template shows is text: control characters and markup in it are escaped, so that nothing from a run's folder
becomes markup. `markup.html` has the macros that pages share: tables, figures of bars, legends.

A *bar* is a row of a figure: a label and a text above, a thick line of *parts*, and a thin one below it. Lengths are in
the unit of the values, on one scale per figure. Each part has its own color and pattern (records/palette.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..records.palette import CATEGORIES, COLLECTIVES, PHASES, Fills
from ..sizes import printable

WIDTH = 360.0
"""Width of a figure, in its own units."""

FILLS: Fills = {**CATEGORIES, **COLLECTIVES, **PHASES, "step": ("#0072B2", ""), "states": ("#999999", "")}
"""All parts that bars have: names are unique across the figures."""

HATCHES = {
    "": "",
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
    """A part of a bar; `tip`: its tooltip; `value`: its length."""

    name: str
    value: float
    tip: str


@dataclass(frozen=True)
class Bar:
    """A row. `mark`: the prediction; `reach`: the ends of an interval; `absent`: shown if there are no `parts`."""

    label: str
    text: str
    tip: str
    parts: Sequence[BarPart] = ()
    below: Sequence[BarPart] = ()
    mark: float | None = None
    reach: tuple[float, float] | None = None
    absent: str = ""

    @property
    def farthest(self) -> float:
        """The largest distance from zero."""
        lines = [[part.value * way for part in line] for line in (self.parts, self.below) for way in (1, -1)]
        sums = [sum(value for value in line if value > 0) for line in lines]
        return max(*sums, self.mark or 0.0, *map(abs, self.reach or (0.0,)))


@dataclass(frozen=True)
class BarFigure:
    """Bars with a legend of the parts in them. `zero`: the x of values of 0. `marks`: further entries of the legend,
    each "mark" or "whisker" with its meaning.
    """

    title: str
    caption: str
    bars: Sequence[Bar]
    zero: float = 0.0
    marks: Sequence[tuple[str, str]] = ()

    @property
    def scale(self) -> float:
        """Width of a unit of the values."""
        return (WIDTH - self.zero) / (max((bar.farthest for bar in self.bars), default=0.0) or 1.0)

    @property
    def legend(self) -> list[str]:
        """The parts that have a length, in the order of FILLS."""
        drawn = {part.name for bar in self.bars for part in (*bar.parts, *bar.below) if part.value}
        return [name for name in FILLS if name in drawn]

    def line(self, parts: Sequence[BarPart]) -> Iterator[tuple[BarPart, float, float]]:
        """Yields each part of a line with its x and width: negative parts to the left of zero."""
        ordered = [*(part for part in reversed(parts) if part.value < 0), *(part for part in parts if part.value > 0)]
        x = self.zero + self.scale * sum(min(part.value, 0.0) for part in parts)
        for part in ordered:
            width = abs(part.value) * self.scale
            yield part, x, width
            x += width


@cache
def _templates() -> Any:
    import jinja2

    def as_text(value: object) -> object:
        return value if hasattr(value, "__html__") else "\n".join(map(printable, str(value).split("\n")))

    loader = jinja2.FileSystemLoader(Path(__file__).parents[1])
    made = jinja2.Environment(
        loader=loader, autoescape=True, finalize=as_text, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.globals |= {"FILLS": FILLS, "HATCHES": HATCHES, "WIDTH": WIDTH}
    return made


def render(template: str, **values: Any) -> str:
    """Fills in a template, named by its path in the package."""
    return str(_templates().get_template(template).render(values))
