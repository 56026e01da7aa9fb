"""The recorded step as a film for slides: one GIF or MP4, drawn by matplotlib from the streams of a page.

Each strategy has an axis with one rank's memory by category over the clock, in full color up to the cursor; above it
the current bytes, below it the collective in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.animation import AbstractMovieWriter, FFMpegWriter, PillowWriter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from ...host.terminal import progress_bar
from ...records.palette import CATEGORIES
from ...results.events import collectives_of, live_bytes
from ...sizes import show_bytes
from .clock import TICKS, phases_of, ticks_of
from .worlds import Panel, ReplayWorld

FORMATS = {".gif": (6, 72), ".mp4": (24, 100)}
"""Suffix -> frames per second, and dots per inch."""
FLASH = 150
"""Ticks for which a collective without a recorded wait is shown, as on the page."""


@dataclass(frozen=True)
class Reel:
    """One stream of a film. `sums`: category -> live device bytes after each event; `flights`: its collectives."""

    panel: Panel
    rank: int
    events: pd.DataFrame
    ticks: NDArray[np.int64]
    sums: dict[str, NDArray[np.int64]]
    flights: list[tuple[int, int, str]]

    @property
    def total(self) -> NDArray[np.int64]:
        """Live bytes on the device after each event."""
        total: NDArray[np.int64] = np.add.reduce(list(self.sums.values()), dtype=np.int64)
        return total

    def at(self, tick: float) -> int:
        """Returns the last event at a tick or before."""
        return max(0, int(np.searchsorted(self.ticks, tick, side="right")) - 1)

    def in_flight(self, tick: float) -> str:
        """Returns a description of the newest collective in flight at a tick."""
        here, last = self.at(tick), ""
        for begin, end, words in self.flights:
            flies = here < end if end >= 0 else tick - self.ticks[begin] <= FLASH
            last = words if begin <= here and flies else last
        return last


def flights_of(events: pd.DataFrame) -> list[tuple[int, int, str]]:
    """Returns, for each collective, the event of its first launch, that of its wait or -1, and its description."""
    return [
        (one.begin, one.end, f"{one.name.replace('_', '-')}, {show_bytes(int(one.total('bytes')))}")
        for one in collectives_of(list(events.itertuples(index=False)))
    ]


def write_film(to: Path, world: ReplayWorld, seconds: float) -> None:
    """Writes the film of a world's first shown rank."""
    fps, dpi = FORMATS[to.suffix]
    reels = reels_of(world)
    to.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(12.8, 4.6), layout="constrained")
    update = _drawn(figure, reels, world)
    writer: AbstractMovieWriter = PillowWriter(fps) if to.suffix == ".gif" else FFMpegWriter(fps, bitrate=2400)
    ticks = np.linspace(0, TICKS, max(2, round(seconds * fps)))
    with writer.saving(figure, str(to), dpi), progress_bar(f"drawing {to.name}", len(ticks), "frames") as advance:
        for tick in ticks:
            update(float(tick))
            writer.grab_frame()
            advance()


def reels_of(world: ReplayWorld) -> list[Reel]:
    """Returns the first stream of each panel, on one clock."""
    shown = [(panel, rank, panel.streams[rank]) for panel in world.panels for rank in list(panel.streams)[:1]]
    clocks = ticks_of([events for _, _, events in shown])
    found = []
    for (panel, rank, events), ticks in zip(shown, clocks, strict=True):
        sums = live_bytes(events)["device"]
        by_category = {name: sums[name].to_numpy() for name in CATEGORIES}
        found.append(Reel(panel, rank, events, ticks, by_category, flights_of(events)))
    return found


def _drawn(figure: Figure, reels: Sequence[Reel], world: ReplayWorld) -> Any:
    """Draws the static parts; returns the function that draws a tick."""
    most = max(int(reel.total.max()) for reel in reels)
    axes = figure.subplots(1, len(reels), sharey=True, squeeze=False)[0]
    moving = [_axis(one, reel, most) for one, reel in zip(axes, reels, strict=True)]
    handles = [Patch(facecolor=c, hatch=h, edgecolor="white", label=name) for name, (c, h) in CATEGORIES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    row = reels[0].panel.row
    words = f"One step of {row['model']}, N = {world.ranks}, {world.how}: live memory of a rank"
    figure.suptitle(words, fontsize=12)

    def update(tick: float) -> None:
        for reel, (cover, line, now, wire) in zip(reels, moving, strict=True):
            cover.set_x(tick)
            cover.set_width(TICKS - tick)
            line.set_xdata([tick, tick])
            now.set_text(show_bytes(int(reel.total[reel.at(tick)])))
            wire.set_text(reel.in_flight(tick) or "nothing in flight")

    return update


def _axis(axes: Axes, reel: Reel, most: int) -> tuple[Any, Any, Any, Any]:
    """Draws a stream's memory and the moving parts: a veil over the future, the cursor, two texts."""
    first = int((reel.events["kind"] == "live").sum()) - 1
    low = np.zeros(len(reel.ticks) - max(first, 0))
    for name, (color, hatch) in CATEGORIES.items():
        high = low + reel.sums[name][max(first, 0) :] / 2**20
        edge = {"step": "post", "facecolor": color, "hatch": hatch, "edgecolor": "white", "lw": 0}
        axes.fill_between(reel.ticks[max(first, 0) :], low, high, **edge)  # type: ignore[arg-type]
        low = high
    for name, tick in _wide_phases(reel):
        axes.axvline(tick, color="black", lw=0.6, ls=":")
        axes.text(tick + 60, most / 2**20 * 1.02, name, fontsize=8, va="bottom")
    axes.set(xlim=(0, TICKS), ylim=(0, most / 2**20 * 1.14), xticks=[])
    axes.set_title(f"{reel.panel.label}, rank {reel.rank}", loc="left", fontsize=11, fontweight="bold")
    axes.tick_params(labelsize=8)
    axes.set_ylabel("MiB" if axes.get_subplotspec().is_first_col() else "", fontsize=9)  # type: ignore[union-attr]
    cover = axes.axvspan(0, TICKS, color="white", alpha=0.72, lw=0)
    line = axes.axvline(0, color="black", lw=1.4)
    now = axes.text(1, 1.02, "", transform=axes.transAxes, ha="right", va="bottom", fontsize=11, fontweight="bold")
    wire = axes.text(0.5, -0.03, "", transform=axes.transAxes, ha="center", va="top", fontsize=9, color="#8a3b00")
    return cover, line, now, wire


def _wide_phases(reel: Reel) -> Iterator[tuple[str, int]]:
    """Yields the phases that are wide enough for a name."""
    phases = phases_of(reel.events, reel.ticks)
    for (name, tick), (_, end) in zip(phases, [*phases[1:], ("", TICKS)], strict=True):
        if end - tick > TICKS / 8:
            yield name, tick
