"""One style for all figures: readable in print, by the color-blind, and without color (hatches, markers)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from matplotlib.axes import Axes
from matplotlib.colors import is_color_like
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..host.files import read_text
from ..records import palette
from ..records.palette import Fills
from ..results.tables import Results, run_folders
from ..strategies import Look, find, spare_look
from .page import NUMBER

BLACK, ORANGE, SKY, GREEN = palette.BLACK, palette.ORANGE, palette.SKY, palette.GREEN
YELLOW, BLUE, VERMILION, PURPLE, GRAY = palette.YELLOW, palette.BLUE, palette.VERMILION, palette.PURPLE, palette.GRAY
CATEGORIES, COLLECTIVES = palette.CATEGORIES, palette.COLLECTIVES
OVERLAP, PHASES = palette.OVERLAP, palette.PHASES

_COLORS: dict[str, str] = {}
"""Strategy that only a user's script knows -> the color recorded with its runs."""


def learn_colors(results: Results, folders: Iterable[Path]) -> None:
    """Reads the colors of users' strategies from the provenance of their runs in `folders`."""
    strategies = dict(zip(results.runs["run_id"], results.runs["strategy"], strict=True))
    for run in (run for folder in folders for run in run_folders(folder)):
        strategy, file = strategies.get(run.name), run / "provenance.json"
        if strategy is None or find(strategy) is not None or not file.is_file():
            continue
        # a damaged file costs a color, not the figure
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            color = json.loads(read_text(file))["look"]["color"]
            if is_color_like(color):
                _COLORS[strategy] = color


def look(strategy: str) -> Look:
    """The look of a strategy from the table of strategies; otherwise derived from its name, in its recorded color."""
    row, spare = find(strategy), spare_look(crc32(strategy.encode()))
    return row.look if row is not None else spare._replace(color=_COLORS.get(strategy, spare.color))


def stack(axes: Axes, x: float, parts: Mapping[str, float], fills: Fills, width: float) -> float:
    """Draws the parts as one stacked bar; returns its height."""
    bottom = 0.0
    for name, height in parts.items():
        color, hatch = fills[name]
        axes.bar(x, height, width, bottom, color=color, hatch=hatch, edgecolor="white", lw=0.4, label=name)
        bottom += height
    return bottom


LEAST = 0.002
"""Fraction of an axis: a smaller bar is invisible, and a legend does not name it."""


def seen(figure: Figure, fills: Fills) -> Fills:
    """Returns the `fills` that are visible in a figure's bars (`stack`)."""
    visible: set[object] = set()
    for axes in figure.axes:
        least = LEAST * axes.get_ylim()[1]
        for bars in axes.containers:
            if isinstance(bars, BarContainer) and any(bar.get_height() > least for bar in bars):
                visible.add(bars.get_label())
    return {name: fill for name, fill in fills.items() if name in visible}


def patches(fills: Fills) -> list[Patch]:
    """Legend entries for parts of bars."""
    return [Patch(facecolor=c, hatch=h, edgecolor="white", label=name) for name, (c, h) in fills.items()]


def rule(label: str, line: str = "-", **more: object) -> Line2D:
    """A legend entry for a line that does not belong to a strategy."""
    return Line2D([], [], linestyle=line, label=label, **{"color": "black", **more})


def number(axes: Axes, x: float, height: float, text: str, gap: float = 3) -> None:
    """Writes the number of a bar, or of a point, `gap` points above it."""
    axes.annotate(
        text, (x, height), (0, gap), textcoords="offset points", ha="center", va="bottom", fontsize="small", gid=NUMBER
    )
