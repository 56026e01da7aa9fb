"""Throughput of a disk, and how much of it the engine's files reach, as `zerobench calibrate --disk` measured it.

    python analysis/disk.py FOLDER --out DIR

A panel for mixed, read and write; bars are medians by block size × depth, whiskers their 95 % intervals, numbers the
share of the plain calls' throughput, and of an update that of the slower of disk and update in memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.calibration import script
from analysis.page import Sheet, key
from analysis.style import BLUE, GRAY, GREEN, ORANGE, PURPLE
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

LOOKS = {
    RAW: (GRAY, "", "preadv and pwritev"),
    STORE: (BLUE, "//", "the engine's files"),
    CHECKED: (ORANGE, "xx", "with checksums"),
    UPDATE: (GREEN, "..", "an update over files"),
    IN_MEMORY: (PURPLE, "\\\\", "the same in memory"),
}
MIB = 2**20
WIDTH = 0.8
"""Of the bars of one block size and depth together."""


def draw(found: DiskCalibration) -> Figure:
    """A panel a kind."""
    kinds = list(dict.fromkeys(rate.kind for rate in found.rates))
    told, direct = found.provenance, found.rates[0].direct
    words = f"{told['disk']['file_system']}, {'direct I/O' if direct else 'through the page cache'}"
    figure = Sheet(1, 2.2, f"Throughput of a disk: {words}, {told['cores']} cores, {told['date'][:10]}.")
    for axes, kind in zip(figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True):
        _bars(axes, [rate for rate in found.rates if rate.kind == kind])
        axes.set_title(kind)
        axes.set_xlabel("block (MiB) × at once")
    figure.axes[0].set_ylabel("GiB/s")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    key(figure, handles, labels)
    return figure


def _bars(axes: Axes, rates: list[DiskRate]) -> None:
    places = list(dict.fromkeys((rate.block_bytes, rate.depth) for rate in rates))
    there = [via for via in LOOKS if any(rate.via == via for rate in rates)]
    width = WIDTH / len(there)
    for number, via in enumerate(there):
        color, hatch, label = LOOKS[via]
        mine = [rate for rate in rates if rate.via == via]
        shift = width * (number - (len(there) - 1) / 2)
        x = [places.index((rate.block_bytes, rate.depth)) + shift for rate in mine]
        y = [rate.bytes_per_s / GIB for rate in mine]
        reach = [
            [(rate.bytes_per_s - rate.bytes_per_s_low) / GIB for rate in mine],
            [(rate.bytes_per_s_high - rate.bytes_per_s) / GIB for rate in mine],
        ]
        axes.bar(x, y, width, yerr=reach, color=color, hatch=hatch, edgecolor="white", lw=0.4, capsize=2, label=label,
                 error_kw={"lw": 0.8})  # fmt: skip
        for place, rate in zip(x, mine, strict=True):
            if via not in (RAW, IN_MEMORY):
                axes.text(place, 0.02, f"{rate.of_bound:.2f}", rotation=90, ha="center", va="bottom", fontsize="small",
                          bbox={"color": "white", "pad": 0.5})  # fmt: skip
    axes.set_xticks(range(len(places)), [f"{block / MIB:g} × {depth}" for block, depth in places], fontsize="small")


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    usual = "results/calibration/disk"
    return script("disk", __doc__, lambda folder: draw(load_disk_calibration(folder)), usual, arguments)


if __name__ == "__main__":
    sys.exit(main())
