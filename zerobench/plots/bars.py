"""Figures with a bar for each cell: memory by category, volume by collective, the time of a step by phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ..records import STATES
from ..records.palette import CATEGORIES, COLLECTIVES, OVERLAP, PHASES, VERMILION
from ..results.tables import Results
from ..sizes import show_bytes
from .marks import absent, bars, number, patches, rule, seen, show, size_unit, split, stack
from .page import Sheet, key, sheet
from .panels import MOST_PANELS, cell_rows, comparisons, on_cores, title, with_values

OUTSIDE: dict[str, Any] = {"fill": False, "hatch": "////", "linewidth": 0.8}
"""The part that is not a category of the ledger: the allocator's peak minus the ledger's."""

LEAST_OUTSIDE = 0.001
"""Fraction of the peak below which that part is not drawn."""

MEMORY_CAPTION = "Left bar: model states at their maximum. Right bar: everything at the peak."
OUTSIDE_CAPTION = (
    " Hatched, outside the ledger: memory that the allocator held at its peak and no tensor had, such as scratch of"
    " kernels; the numbers leave it out."
)


def memory(results: Results, panels: int = MOST_PANELS, capacity: int | None = None) -> Sheet:
    """Memory per strategy, stacked by category, with the prediction marked.

    Two bars per strategy: the model states (and buffers in flight) at their own maximum, to which formulas apply; and
    everything at the instant of the overall peak, with the allocator's bytes beyond the ledger on top, hatched. A
    bar's number is the ledger's, as in tables. Each is on the rank that needs the most, over the newest launches. One
    panel for each set of cells that train the same thing; a cell that failed, or was not run, is drawn as such.

    `capacity`: bytes of a rank, drawn as a line.
    """
    settings = comparisons(results)
    largest = max([results.runs["peak_bytes"].max(), capacity], key=lambda size: 0 if pd.isna(size) else size)
    name, unit = size_unit(largest)
    drawn = (cell for cells in settings[:panels] for cell in cells[cells["status"] == "ok"].itertuples())
    is_beyond = any(_outside(cell) for cell in drawn)
    figure, grid = sheet(settings, panels, (3.2, 2.5), MEMORY_CAPTION + (OUTSIDE_CAPTION if is_beyond else ""))
    for axes, cells in grid:
        bars(axes, cells, lambda axes, x, cell: _draw_memory(axes, x, cell, results, unit))
        axes.set_ylabel(f"{name}, largest rank")
        axes.set_title(title(cells, settings), loc="left")
        if capacity is not None:
            axes.axhline(capacity / unit, color=VERMILION, ls="--", lw=1.4)
    lines = [
        rule("states predicted, buffers in flight included", lw=1.8),
        rule("states by the paper's formula alone", ":", lw=1.4),
    ]
    if capacity is not None:
        lines.append(rule(f"capacity of a rank: {show_bytes(capacity)}", "--", lw=1.4, color=VERMILION))
    outside = [Patch(label="outside the ledger", **OUTSIDE)] if is_beyond else []
    key(figure, [*patches(seen(figure, CATEGORIES)), *outside, *lines])
    return figure


def _draw_memory(axes: Axes, x: int, cell: Any, results: Results, unit: int) -> None:
    rows = cell_rows(results, "memory", cell)
    rows = rows[(rows["phase"] == "step") & (rows["tier"] == "device")]
    if rows.empty:
        absent(axes, x, "no memory table")
        return
    for shift, total, column in ((-0.2, "states", "at_states_peak_bytes"), (0.2, "total", "at_peak_bytes")):
        most = rows[rows["category"] == total].sort_values("max_bytes").iloc[-1]
        rank = rows[(rows["run_id"] == most["run_id"]) & (rows["rank"] == most["rank"])]
        sizes = rank.set_index("category")[column]
        parts = {name: int(sizes[name]) / unit for name in (STATES if total == "states" else CATEGORIES)}
        height, above = stack(axes, x + shift, parts, CATEGORIES, 0.36), 0.0
        if total == "total" and (outside := _outside(cell)):
            above = outside / unit
            axes.bar(x + shift, above, 0.36, bottom=height, **OUTSIDE)
        number(axes, x + shift, height + above, show(height))  # of the ledger, as in tables
    for states, line, width in ((cell.predicted_states_bytes, "-", 1.8), (cell.floor_states_bytes, ":", 1.4)):
        if not pd.isna(states):  # theory predicts no states of a peer
            axes.hlines(states / unit, x - 0.4, x, color="black", lw=width, linestyles=line)


def _outside(cell: Any) -> float:
    """Returns the bytes of a cell's allocator at its peak beyond the ledger's; 0 if they are too few to be drawn."""
    outside = cell.outside_ledger_bytes
    return 0.0 if pd.isna(outside) or outside < LEAST_OUTSIDE * cell.peak_bytes else float(outside)


def volume(results: Results, panels: int = MOST_PANELS) -> Sheet:
    """Communication volume of a step per strategy, in ψ (elements moved over parameters), stacked by collective.

    By the paper's convention, an all-reduce of ψ elements counts 2ψ, a reduce-scatter or an all-gather ψ. The black
    mark is the prediction. One panel for each set of cells that train the same thing; a cell that failed, or was not
    run, is drawn as such.
    """
    settings = with_values(comparisons(results), "volume_psi", "no volumes")
    figure, grid = sheet(settings, panels, (3.2, 2.2), "What a rank communicates in one step, by collective.")
    for axes, cells in grid:
        bars(axes, cells, _draw_volume)
        axes.set_ylabel("volume of a step (ψ)")
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]) * 1.08)
        axes.set_title(title(cells, settings), loc="left")
    key(figure, [*patches(seen(figure, COLLECTIVES)), rule("predicted", lw=1.8)])
    return figure


def _draw_volume(axes: Axes, x: int, cell: Any) -> None:
    parts = {name: getattr(cell, f"volume_{name}_psi") for name in COLLECTIVES}
    height = stack(axes, x, parts, COLLECTIVES, 0.6)
    number(axes, x, height, f"{height:.3f}")
    axes.hlines(cell.predicted_volume_psi, x - 0.38, x + 0.38, color="black", lw=1.8)


MS = 1000


def step_time(results: Results, panels: int = MOST_PANELS) -> Sheet:
    """Time of a step per strategy, split into forward, backward and update, with the step's 95 % interval.

    The dot is the step of the slowest rank: for one launch, the median over its steps with the interval of that
    median; for several launches, the geometric mean of their medians with a t-interval over launches. The figure says
    which. A bar is as high as the dot, and split in the proportions of the phases' own medians, which do not add up
    to the step's. With too few steps there is no interval. A cell that failed, or was not run, is drawn as such.

    A cell that was traced (measure.trace=true) has a second bar, the step of the traced pass, which the profiler
    slows down: time without communication, time in which computation hides communication, and exposed communication.
    """
    settings = with_values(comparisons(results), "step_s", "no times")
    figure, grid = sheet(settings, panels, (3.2, 2.4), _step_caption(settings))
    for axes, cells in grid:
        bars(axes, cells, _draw_step)
        axes.set_ylabel("step on the slowest rank (ms)")
        axes.set_title(title(cells, settings), loc="left")
    step = rule("step, 95 % interval", marker="o", ms=4, lw=1.2)
    traced = patches(OVERLAP) if any(is_traced(cells).any() for cells in settings) else []
    key(figure, [*patches(seen(figure, PHASES)), step, *traced])
    return figure


def is_traced(cells: Any) -> Any:
    """True for a cell, or for each of several, that has a traced pass to draw."""
    return pd.notna(cells.traced_step_s) & (cells.status == "ok")


def _step_caption(settings: Sequence[pd.DataFrame]) -> str:
    """Returns the caption, with the unit of the intervals: launches or steps."""
    cells = pd.concat(settings)
    cells = cells[cells["status"] == "ok"]
    if cells.empty:
        return "No cell is ok."
    known = cells[cells["step_s_low"].notna()]
    several, single = known[known["launches"] > 1], known[known["launches"] == 1]
    spans = []
    if len(several):
        counts = sorted({int(count) for count in several["launches"]})
        spans.append(f"over {' or '.join(map(str, counts))} launches")
    if len(single):
        spans.append(f"over the steps of one launch{' elsewhere' if spans else ''}")
    sentences = [f"Intervals: {'; '.join(spans) or 'none'}{on_cores(settings)}."]
    sentences.append("Bars are split in the proportions of the phases' medians.")
    if len(known) < len(cells):
        sentences.append("Without whiskers: too few steps or launches for an interval.")
    if is_traced(cells).any():
        sentences.append("Right bar: the traced pass, slowed down by the profiler.")
    return " ".join(sentences)


def _draw_step(axes: Axes, x: int, cell: Any) -> None:
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
