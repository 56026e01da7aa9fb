"""Faults of a figure that a reader would see: text too small to read, texts on one another, text beyond the edge.

Measured on the settled figure by matplotlib's bounding boxes, in dots.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text

LEAST_POINTS = 7
TOUCH = 0.5
"""Dots by which boxes may overlap: they are a little larger than the letters."""


def faults(figure: Figure) -> list[str]:
    """A sentence for each fault."""
    figure.draw_without_rendering()  # places the legends' texts
    found = [(text, Text.get_window_extent(text)) for text in texts_of(figure)]  # without the line to a name's point
    legends = [(legend, legend.get_window_extent()) for legend in legends_of(figure)]
    said = [f"{_told(t)} is of {t.get_fontsize():.1f} pt" for t, _ in found if t.get_fontsize() < LEAST_POINTS]
    page = figure.bbox.padded(TOUCH)
    for one, box in [*found, *legends]:
        if not (page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1):
            said.append(f"{_told(one)} leaves the figure")
    for (one, box), (other, beside) in combinations(found, 2):
        if box.padded(-TOUCH).overlaps(beside.padded(-TOUCH)):
            said.append(f"{_told(one)} lies on {_told(other)}")
    for legend, box in legends:
        inside = {id(text) for text in legend.findobj(Text)}
        said += [
            f"{_told(legend)} lies on {_told(text)}"
            for text, its in found
            if id(text) not in inside and box.padded(-TOUCH).overlaps(its)
        ]
    return said


def legends_of(figure: Figure) -> list[Legend]:
    """The figure's own legends, and those of its axes."""
    own = [axes.get_legend() for axes in figure.axes]
    return [*figure.legends, *(legend for legend in own if legend is not None)]


def texts_of(figure: Figure) -> list[Text]:
    """All texts that are to be seen."""
    return [text for text in _every_text(figure) if text.get_visible() and text.get_text().strip()]


def _every_text(figure: Figure) -> Iterator[Text]:
    yield from figure.texts  # the caption among them
    for legend in legends_of(figure):
        yield from legend.findobj(Text)
    for axes in figure.axes:
        if axes.get_visible():
            yield from _of_axes(axes)


def _of_axes(axes: Axes) -> Iterator[Text]:
    yield from axes.texts
    yield from (axes.title, axes._left_title, axes._right_title)
    if not axes.axison:
        return
    for axis in (axes.xaxis, axes.yaxis):
        yield axis.label
        yield axis.get_offset_text()
        yield from _of_ticks(axis)


def _of_ticks(axis: Axis) -> Iterator[Text]:
    low, high = sorted(axis.get_view_interval())
    slack = 1e-9 * (high - low)
    for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
        if low - slack <= tick.get_loc() <= high + slack:
            yield tick.label1


def _told(one: Text | Legend) -> str:
    if isinstance(one, Legend):
        return "a legend"
    return repr(one.get_text().replace("\n", " / ")[:50])
