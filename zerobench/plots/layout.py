"""Text within a figure that has been laid out once: what is too long is wrapped, what would run together is turned.

Lengths are dots of the figure, as matplotlib's bounding boxes have them. *Numbers* are texts of the group NUMBER, which
stand above their bars.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from re import sub
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

NUMBER = "number"
"""`gid` of the texts above bars."""

TOGETHER = re.compile(r" (?=[=×%])|(?<=[=×]) |(?<=\d) (?=[A-Z])")
"""Spaces at which no line is broken: within "N = 2" and "1.04 M"."""

GAP = 3
"""Dots that are to be between two labels."""

STUCK = "\N{NO-BREAK SPACE}"
"""Between words that a line's end is to leave together: lines end at commas and periods where they can."""


def wrap_titles(figure: Figure) -> None:
    """Breaks titles that are wider than their axes, and a caption that is wider than the figure."""
    for axes in figure.axes:
        for side in ("left", "center"):
            if axes.get_title(loc=side):
                title = axes.title if side == "center" else axes._left_title
                _wrap(title, _room(figure, axes, side))
    suptitle = figure._suptitle
    if suptitle is not None:
        _wrap(suptitle, 0.96 * figure.bbox.width)


def _room(figure: Figure, axes: Axes, side: str) -> float:
    """Dots that a title of the axes may take: up to the next one, or to the figure's edge."""
    box = axes.get_window_extent()
    if side == "center":
        middle = (box.x0 + box.x1) / 2
        return 2 * min(middle, figure.bbox.width - middle, 0.62 * box.width)
    beside = [other.get_window_extent() for other in figure.axes if other is not axes and _titled(other)]
    right = [other.x0 for other in beside if other.x0 > box.x0 and abs(other.y1 - box.y1) < 0.1 * box.height]
    return min([figure.bbox.width, *right]) - box.x0 - GAP


def _titled(axes: Axes) -> bool:
    return any(axes.get_title(loc=side) for side in ("left", "center"))


def _wrap(text: Text, room: float) -> None:
    words = TOGETHER.sub("\u00a0", " ".join(text.get_text().split()))
    text.set_text(words)
    wide = text.get_window_extent().width
    if wide > room:
        letters = max(8, int(len(words) * room / wide))
        lines = [fill(one, letters, break_long_words=False) for one in (words, sub(r"(?<![,.:;]) ", STUCK, words))]
        kept = lines[1] if max(map(len, lines[1].split("\n"))) <= letters else lines[0]
        text.set_text(kept.replace(STUCK, " "))


def stand_upright(figure: Figure) -> None:
    """Turns the names below the x axis, and the numbers above bars, where they would run together."""
    for axes in figure.axes:
        names = [label for label in axes.get_xticklabels() if label.get_text()]
        if run_together(names):
            for name in names:
                name.set(rotation=90, va="top", ha="center")
        numbers = [text for text in axes.texts if text.get_gid() == NUMBER]
        if run_together(numbers):
            for number in numbers:
                number.set(rotation=90, text=number.get_text().replace("\n", " "))


def run_together(labels: Sequence[Text]) -> bool:
    """True where two neighbors touch."""
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
    return any(a.padded(GAP / 2).overlaps(b.padded(GAP / 2)) for a, b in pairwise(boxes))


def headroom(axes: Axes) -> None:
    """Raises the y axis until the numbers are below its end."""
    inside, high = axes.get_window_extent(), axes.transData
    for text in axes.texts:
        if text.get_gid() != NUMBER or not text.get_visible():
            continue
        box: Bbox = text.get_window_extent()
        over = box.y1 + GAP - inside.y1
        foot = high.transform((0, text.xy[1]))[1]
        if over <= 0 or foot <= inside.y0:
            continue
        grown = (foot - inside.y0) / (inside.y1 - inside.y0 - (box.y1 + GAP - foot))
        if grown > 0:
            top = high.inverted().transform((0, inside.y0 + grown * inside.height))[1]
            axes.set_ylim(top=max(top, axes.get_ylim()[1]))
