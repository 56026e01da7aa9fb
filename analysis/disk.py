"""Throughput of a disk, and how much of it the engine's files reach, as `zerobench calibrate --disk` measured it.

    python analysis/disk.py [FOLDER] --out DIR

Read, write and mixed, on one scale: medians by block size × depth with 95 % intervals; the number over a bar is its
fraction of the plain calls' throughput at the same blocks and depth. Update: the engine's update over files between its
two bounds, the disk (mixed, plain calls) and the same update in memory, on a logarithmic scale; the number is its
fraction of the slower bound.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import FIGURES_OUT, folder_script
from zerobench.calibrate.disk import (
    CHECKED,
    GIB,
    IN_MEMORY,
    RAW,
    STORE,
    UPDATE,
    DiskCalibration,
    DiskRate,
    load_disk_calibration,
)
from zerobench.plots.page import Sheet, key, room_for
from zerobench.plots.style import BLUE, GRAY, GREEN, ORANGE, PURPLE

LOOKS = {
    RAW: (GRAY, "", "preadv and pwritev"),
    STORE: (BLUE, "//", "the engine's files"),
    CHECKED: (ORANGE, "xx", "the engine's files, with checksums"),
}
"""Bars."""

UPDATES = {
    IN_MEMORY: (PURPLE, "s", "bound: the update in memory"),
    RAW: (GRAY, "o", "bound: the disk, mixed"),
    UPDATE: (GREEN, "D", "the update over files"),
}
"""Points."""

UPDATED = "mixed"
"""Which kind of traffic an update is."""

MIB = 2**20
WIDTH = 0.8
"""Width of the bars, or points, of one block size and depth together."""

CAPTION = "Over a bar: its fraction of the plain calls. Over an update: its fraction of the slower bound."


def draw(found: DiskCalibration) -> Figure:
    """A panel a kind, on one scale, and one for the update where it was measured."""
    kinds = sorted({rate.kind for rate in found.rates}, key=lambda kind: (kind == UPDATED, kind))
    updates = [rate for rate in found.rates if rate.kind == UPDATED and rate.via in UPDATES]
    count = len(kinds) + any(rate.via == UPDATE for rate in updates)
    abreast = min(count, room_for(3.2))
    rows = -(-count // abreast)
    told, direct = found.provenance, found.rates[0].direct
    words = f"{told['disk']['file_system']}, {'direct I/O' if direct else 'through the page cache'}"
    figure = Sheet(rows, 1.9, f"Throughput of a disk: {words}, {told['cores']} cores, {told['date'][:10]}. {CAPTION}")
    axes = list(figure.subplots(rows, abreast, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    for place, kind in zip(axes, kinds, strict=False):
        _bars(place, [rate for rate in found.rates if rate.kind == kind and rate.via in LOOKS])
        place.set_title(kind)
        place.set_ylim(0, 1.18 * max(rate.bytes_per_s_high for rate in found.rates if rate.via in LOOKS) / GIB)
        place.set_ylabel("GiB/s")
    if count > len(kinds):
        _points(axes[len(kinds)], updates)
    for place in axes[:count]:
        place.set_xlabel("block (MiB) × at once")
    key(figure, *axes[0].get_legend_handles_labels())
    return figure


def _bars(axes: Axes, rates: list[DiskRate]) -> None:
    places = _places(rates)
    there = [via for via in LOOKS if any(rate.via == via for rate in rates)]
    width = WIDTH / len(there)
    for number, via in enumerate(there):
        color, hatch, label = LOOKS[via]
        mine = [rate for rate in rates if rate.via == via]
        shift = width * (number - (len(there) - 1) / 2)
        x = [places.index((rate.block_bytes, rate.depth)) + shift for rate in mine]
        y, reach = _heights(mine)
        axes.bar(x, y, width, yerr=reach, color=color, hatch=hatch, edgecolor="white", lw=0.4, capsize=2, label=label,
                 error_kw={"lw": 0.8})  # fmt: skip
        if via != RAW:
            _number(
                axes, x, [rate.bytes_per_s_high / GIB for rate in mine], [rate.of_raw for rate in mine], len(places)
            )
    _name_places(axes, places)


def _points(axes: Axes, rates: list[DiskRate]) -> None:
    """An update and its bounds: too far apart for bars from zero."""
    places = _places(rates)
    for number, (via, (color, marker, label)) in enumerate(UPDATES.items()):
        mine = [rate for rate in rates if rate.via == via]
        x = [places.index((rate.block_bytes, rate.depth)) + WIDTH / 4 * (number - 1) for rate in mine]
        y, reach = _heights(mine)
        axes.errorbar(x, y, reach, color=color, marker=marker, ls="", ms=5, capsize=2, lw=1, label=label)
        if via == UPDATE:
            _number(axes, x, [rate.bytes_per_s_high / GIB for rate in mine], [rate.of_bound for rate in mine], 1)
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_title("update of states in files")
    axes.set_ylim(bottom=axes.get_ylim()[0] / 3)
    axes.legend(loc="lower right")
    axes.set_ylabel("GiB/s (logarithmic)")
    _name_places(axes, places)


def _places(rates: list[DiskRate]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((rate.block_bytes, rate.depth) for rate in rates))


def _heights(rates: list[DiskRate]) -> tuple[list[float], list[list[float]]]:
    """Medians in GiB/s, and how far their intervals reach down and up."""
    down = [(rate.bytes_per_s - rate.bytes_per_s_low) / GIB for rate in rates]
    up = [(rate.bytes_per_s_high - rate.bytes_per_s) / GIB for rate in rates]
    return [rate.bytes_per_s / GIB for rate in rates], [down, up]


def _number(axes: Axes, x: list[float], y: list[float], fractions: list[float], groups: int) -> None:
    """Fractions above what they are of; upright if there is little room."""
    for place, top, fraction in zip(x, y, fractions, strict=True):
        axes.annotate(f"{fraction:.2f}", (place, top), (0, 3), textcoords="offset points", ha="center", va="bottom",
                      fontsize="small", rotation=90 if groups > 3 else 0)  # fmt: skip


def _name_places(axes: Axes, places: list[tuple[int, int]]) -> None:
    words = [f"{block / MIB:g} × {depth}" for block, depth in places]
    axes.set_xticks(range(len(places)), words)
    axes.set_xlim(-0.5, len(places) - 0.5)


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 if there is nothing to draw."""
    usual = Path("results/calibration/disk")
    return folder_script("disk", __doc__, load_disk_calibration, {"disk": draw}, usual, arguments, FIGURES_OUT)


if __name__ == "__main__":
    sys.exit(main())
