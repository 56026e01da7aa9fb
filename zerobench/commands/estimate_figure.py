"""Estimates as a figure: a bar per cell with the parts of its peak stacked, and a device's memory as a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..fake_execution.parts import PARTS
from ..plots.page import Page
from ..records.palette import CATEGORIES
from ..sizes import SIZES, show_bytes
from .simulated import SimulatedCell

LOOKS = {**CATEGORIES, "logits": ("#F5D5E5", ""), "loss": ("#8B4A72", "//")}
"""Part -> color and hatch; two parts of the activations have their own."""

VISIBLE = 1e-3
"""A part is drawn from this fraction of the highest peak on."""


def draw(cells: Sequence[SimulatedCell], path: Path, title: str, memory: int | None = None) -> None:
    """Draws cells that have an estimate into `path`. Raises ValueError if there is none."""
    if not cells:
        raise ValueError("--figure: no cell has an estimate to draw")
    with Page().used():
        figure = Figure(figsize=(max(4.5, 2.5 + 0.95 * len(cells)), 4.0), layout="constrained")
        axes = figure.subplots()
        highest = max([*(cell.peak_bytes for cell in cells), memory or 0])
        unit = next((name for name in ("tib", "gib", "mib") if highest >= SIZES[name]), "kib")
        _bars(axes, cells, SIZES[unit])
        if memory is not None:
            axes.axhline(memory / SIZES[unit], color="black", linestyle="--", linewidth=1, label=show_bytes(memory))
        axes.set_ylabel(f"peak ({unit[0].upper()}iB)")
        axes.set_title(title, loc="left", fontsize=8, wrap=True)
        axes.set_ylim(0, 1.08 * highest / SIZES[unit])
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        # without a date the same data give the same file
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)


def _bars(axes: Axes, cells: Sequence[SimulatedCell], unit: int) -> None:
    bottoms = [0.0] * len(cells)
    for part in PARTS:
        heights = [cell.parts_bytes[part] / unit for cell in cells]
        if max(heights) > VISIBLE * max(cell.peak_bytes for cell in cells) / unit:
            color, hatch = LOOKS[part]
            style: dict[str, Any] = {"color": color, "hatch": hatch, "edgecolor": "white", "lw": 0.4}
            axes.bar(range(len(cells)), heights, 0.6, bottoms, label=part, **style)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for index, cell in enumerate(cells):
        at = (index, bottoms[index])
        axes.annotate(show_bytes(cell.peak_bytes), at, (0, 3), textcoords="offset points", ha="center", fontsize=7)
    axes.set_xticks(range(len(cells)), [cell.name.replace(" ", "\n") for cell in cells], fontsize=7)
