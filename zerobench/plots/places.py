"""Names beside points: each where it is free, and joined to its point by a line where another point is as near.

All boxes and distances are in pixels of the figure, at its own dpi. A *mark* is the box of a point's marker; *strokes*
are the lines that the axes have already. A name lies on no other name and on no mark, and where it can on no stroke.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from matplotlib.axes import Axes
from matplotlib.path import Path
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

MARK, GAPS = 4.0, (5.0, 12.0, 20.0, 32.0, 46.0)
"""Points: half of a marker's width; the distances at which a name may stand from its point."""

SIDES = [(1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1)]
"""Directions, right and up, in the order in which they are tried."""

CLEARLY = 1.5
"""A name needs no line to its point where every other point is so many times as far."""

CROSSED, UNCLEAR, WRONG = 1.5, 2.0, 5.0
"""Costs of a place, in rings of GAPS: of a crossed stroke, of another point that is as near, of one that is nearer."""

PAPER = {"facecolor": "white", "alpha": 0.8, "pad": 0.3, "linewidth": 0}
LEADER = {"arrowstyle": "-", "lw": 0.5, "color": "#555555", "shrinkA": 0, "shrinkB": 3}

Point = tuple[float, float]


def name_points(axes: Axes, named: Sequence[tuple[str, float, float]], others: Sequence[Point]) -> list[Annotation]:
    """Writes each (name, x, y) beside its point, in data coordinates; `others` are points without a name.

    The figure's layout is final (`once_settled`). A name for which no place is free stands in the first.
    """
    scale = axes.figure.dpi / 72
    marks = {point: _mark(axes, point, scale) for point in [*((x, y) for _, x, y in named), *others]}
    taken, strokes, made = list(marks.values()), _strokes(axes), []
    for name, x, y in named:
        box, leads = _place(axes, _extent(axes, name), (x, y), marks, taken, strokes)
        taken.append(box)
        (right, up), (across, high) = _middle(box), axes.transData.transform((x, y))
        offset = ((right - across) / scale, (up - high) / scale)
        made.append(
            axes.annotate(name, (x, y), offset, textcoords="offset points", ha="center", va="center", fontsize="small",
                          zorder=1.5, bbox=PAPER, arrowprops=LEADER if leads else None)
        )  # fmt: skip
    return made


def _place(
    axes: Axes, extent: Bbox, point: Point, marks: Mapping[Point, Bbox], taken: list[Bbox], strokes: list[Path]
) -> tuple[Bbox, bool]:
    """The box of a name of this extent, and True where a line must join it to its point."""
    others = [mark for at, mark in marks.items() if at != point]

    def unclear(box: Bbox) -> float:
        own, nearest = _distance(box, marks[point]), min((_distance(box, one) for one in others), default=float("inf"))
        return 0 if nearest > CLEARLY * own else WRONG if nearest < own else UNCLEAR

    def cost(ring: int, box: Bbox) -> float:
        own, leader = marks[point], Path([_middle(marks[point]), _middle(box)])
        crossed = sum(path.intersects_bbox(box, False) for path in strokes)
        crossed += sum(leader.intersects_bbox(other, False) for other in taken if other is not own)
        return ring + CROSSED * crossed + unclear(box)

    places = list(_boxes(marks[point], extent, axes.figure.dpi / 72))
    free = [(ring, box) for ring, box in places if not box.count_overlaps(taken) and _within(box, axes.bbox)]
    ring, box = min(free, key=lambda place: cost(*place), default=places[0])
    return box, ring > 0 or unclear(box) > 0


def _boxes(mark: Bbox, extent: Bbox, scale: float) -> Iterator[tuple[int, Bbox]]:
    """The number of the ring, and the place there, from near to far."""
    x, y = _middle(mark)
    width, height = extent.width, extent.height
    for (ring, gap), (right, up) in product(enumerate(GAPS), SIDES):
        reach = gap * scale
        left, low = x + right * (reach + width / 2) - width / 2, y + up * (reach + height / 2) - height / 2
        yield ring, Bbox.from_bounds(left, low, width, height)


def _extent(axes: Axes, name: str) -> Bbox:
    sample = axes.text(0, 0, name, fontsize="small")
    extent = sample.get_window_extent()
    sample.remove()
    return extent


def _strokes(axes: Axes) -> list[Path]:
    lines = [line.get_path().transformed(line.get_transform()) for line in axes.lines if len(line.get_xdata()) > 1]
    return lines + [path.transformed(c.get_transform()) for c in axes.collections for path in c.get_paths()]


def _mark(axes: Axes, point: Point, scale: float) -> Bbox:
    across, up = axes.transData.transform(point)
    half = MARK * scale
    return Bbox.from_bounds(across - half, up - half, 2 * half, 2 * half)


def _middle(box: Bbox) -> Point:
    return (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2


def _distance(box: Bbox, mark: Bbox) -> float:
    """From the box to the middle of the mark."""
    x, y = _middle(mark)
    across, up = max(box.x0 - x, x - box.x1, 0), max(box.y0 - y, y - box.y1, 0)
    return float((across**2 + up**2) ** 0.5)


def _within(box: Bbox, other: Bbox) -> bool:
    return bool(other.x0 <= box.x0 and box.x1 <= other.x1 and other.y0 <= box.y0 and box.y1 <= other.y1)
