"""Time of a step per strategy, split into forward, backward and update, with the step's 95 % interval.

The dot is the step of the slowest rank: for one launch, the median over its steps with the interval of that median; for
several launches, the geometric mean of their medians with a t-interval over launches. The figure says which. A bar is
as high as the dot, and split in the proportions of the phases' own medians, which do not add up to the step's. With too
few steps there is no interval. A cell that failed, or was not run, is drawn as such.

A cell that was traced (measure.trace=true) has a second bar, the step of the traced pass, which the profiler slows
down: time without communication, time in which computation hides communication, and exposed communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..results.tables import Results
from .marks import bars, show, split
from .page import key, sheet
from .panels import MOST_PANELS, comparisons, on_cores, title, with_times
from .style import OVERLAP, PHASES, number, patches, rule, seen, stack

MS = 1000

SPLIT = "Bars are split in the proportions of the phases' medians."


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Draws one bar per cell."""
    settings = with_times(comparisons(results))
    figure, grid = sheet(settings, panels, (3.2, 2.4), caption(settings))
    for axes, cells in grid:
        bars(axes, cells, _draw_cell)
        axes.set_ylabel("step on the slowest rank (ms)")
        axes.set_title(title(cells, settings), loc="left")
    step = rule("step, 95 % interval", marker="o", ms=4, lw=1.2)
    traced = patches(OVERLAP) if any(is_traced(cells).any() for cells in settings) else []
    key(figure, [*patches(seen(figure, PHASES)), step, *traced])
    return figure


def is_traced(cells: Any) -> Any:
    """True for a cell, or for each of several, that has a traced pass to draw."""
    return pd.notna(cells.traced_step_s) & (cells.status == "ok")


def caption(settings: Sequence[pd.DataFrame]) -> str:
    """Returns the caption, with the unit of the intervals: launches or steps."""
    cells = pd.concat(settings)
    cells = cells[cells["status"] == "ok"]
    several, single = cells[cells["launches"] > 1], cells[cells["launches"] == 1]
    spans = []
    if len(several):
        counts = sorted({int(count) for count in several["launches"]})
        spans.append(f"over {' or '.join(map(str, counts))} launches")
    if len(single):
        spans.append(f"over the steps of one launch{' elsewhere' if spans else ''}")
    if not spans:
        return "No cell is ok."
    sentences = [f"Intervals: {'; '.join(spans)}{on_cores(settings)}. {SPLIT}"]
    if cells["step_s_low"].isna().any():
        sentences.append("Without whiskers: too few steps for an interval.")
    if is_traced(cells).any():
        sentences.append("Right bar: the traced pass, slowed down by the profiler.")
    return " ".join(sentences)


def _draw_cell(axes: Axes, x: int, cell: Any) -> None:
    traced = is_traced(cell)
    middle, width = (x - 0.2, 0.36) if traced else (x, 0.6)
    phases = split(cell.step_s * MS, {name: getattr(cell, f"{name}_s") for name in PHASES})
    stack(axes, middle, phases, PHASES, width)
    if traced:
        parts = (cell.traced_step_s - cell.communication_s, cell.communication_s - cell.exposed_s, cell.exposed_s)
        overlap = {name: seconds * MS for name, seconds in zip(OVERLAP, parts, strict=True)}
        stack(axes, x + 0.2, overlap, OVERLAP, width)
    low, step, high = (MS * value for value in (cell.step_s_low, cell.step_s, cell.step_s_high))
    reach = None if pd.isna(low) else [[step - low], [high - step]]
    axes.errorbar([middle], [step], reach, color="black", marker="o", ms=4, capsize=4, lw=1.2)
    top = step if reach is None else high
    number(axes, middle, top, show(step), 5)
