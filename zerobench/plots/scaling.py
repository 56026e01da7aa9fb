"""Model states and peak memory against the number of ranks, at a fixed micro-batch.

Left: the states and buffers in flight, at their maximum. Markers are measured, dashed lines predicted, dotted lines the
paper's formula alone. Right: everything at the peak, measured. Each is on the rank that needs the most. One row of
panels for each model and micro-batch; a cell that failed, or that has no run although others have, is named at its N.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from ..results.tables import Results
from .marks import curves, entries, unit_of
from .page import key, sheet
from .panels import MOST_PANELS, grids, title
from .style import rule

CAPTION = "Memory on the rank with the most, at a fixed micro-batch."


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Draws two panels per setting: states, peak."""
    settings = grids(results)
    name, unit = unit_of(results.runs["peak_bytes"].max())
    figure, grid = sheet(settings, panels, (3.2, 2.1), CAPTION, across=2)
    for (states, peak), cells in grid:
        for group, style in curves(states, cells, "states_bytes", "", unit):
            for column, line in (("predicted_states_bytes", "--"), ("floor_states_bytes", ":")):
                predicted = group[column].astype("float64") / unit
                states.plot(group["world_size"], predicted, color=style["color"], linestyle=line, lw=1.2)
        for _ in curves(peak, cells, "peak_bytes", "-", unit):
            pass
        states.set_ylabel(f"states with buffers in flight ({name})")
        peak.set_ylabel(f"peak ({name})")
        for axes in (states, peak):
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        states.set_title(title(cells, settings, ["micro_batch"]), loc="left")
    lines = [rule("predicted", "--", lw=1.2), rule("the paper's formula alone", ":", lw=1.2)]
    key(figure, [*entries(settings, ""), *lines])
    return figure
