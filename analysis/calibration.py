"""Bandwidth of each collective by the size of the full tensor, as `zerobench calibrate` measured it.

    python analysis/calibration.py FOLDER --out DIR

Points are medians of the slowest rank's times, whiskers their 95 % intervals, lines what is fitted: latency and
bandwidth. The engine's own collectives beside torch's, and a copy in memory as the ceiling.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.page import Sheet, add_page_options, key, page_of
from analysis.style import BLUE, GRAY, ORANGE
from zerobench.calibrate.collectives import Calibration, load_calibration
from zerobench.sweep.aggregate import median_interval

LOOKS = {"seam": (BLUE, "o", "the engine's"), "torch": (ORANGE, "s", "torch's"), "memory": (GRAY, "", "copy in memory")}
GIB = 2**30


def draw(found: Calibration) -> Figure:
    """A panel a collective."""
    names = [name for name in found.transfers["collective"].unique() if name != "copy"]
    first, told = found.transfers.iloc[0], found.provenance
    machine = f"{told['device_class']}, {told['cores']} cores, torch {told['versions']['torch']}"
    caption = (
        f"Size over time of each collective, N = {first.world_size}, {first['dtype']}, {machine}, {told['date'][:10]}."
    )
    figure = Sheet(1, 2.0, caption)
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        for via in LOOKS:
            _curve(axes, found, via, "copy" if via == "memory" else name)
        axes.set_title(name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("full tensor (MiB)")
    figure.axes[0].set_ylabel("size / time (GiB/s)")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    key(figure, handles, labels)
    return figure


def _curve(axes: Axes, found: Calibration, via: str, collective: str) -> None:
    rows = found.transfers[(found.transfers["via"] == via) & (found.transfers["collective"] == collective)]
    if rows.empty:
        return
    color, marker, label = LOOKS[via]
    for size, same in rows.groupby("bytes"):
        seconds = same["seconds"].tolist()
        low, high = median_interval(seconds)
        middle = size / np.median(seconds) / GIB
        reach = None if low is None else [[middle - size / high / GIB], [size / low / GIB - middle]]
        axes.errorbar([size / 2**20], [middle], reach, color=color, marker=marker or "_", ms=4, capsize=3, lw=1)
    sizes = np.geomspace(rows["bytes"].min(), rows["bytes"].max(), 60)
    fit = found.fit(collective, int(rows["world_size"].iloc[0]), via)
    times = np.array([fit.seconds(size) for size in sizes])
    axes.plot(sizes / 2**20, sizes / times / GIB, color=color, lw=1, ls="--" if via == "memory" else "-", label=label)


def script(name: str, doc: str | None, draw: Callable[[Path], Figure], usual: str, arguments: list[str] | None) -> int:
    """A calibration figure's command. `draw` takes the folder, as a rule `usual`. Exit code 2: nothing to draw."""
    parser = argparse.ArgumentParser(
        f"analysis/{name}.py", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help=f"what zerobench calibrate wrote, as {usual}")
    parser.add_argument(
        "--out", type=Path, default=Path("results/figures"), help="folder for figures (default: %(default)s)"
    )
    add_page_options(parser)
    chosen = parser.parse_args(arguments)
    page = page_of(vars(chosen))
    try:
        with page.used():
            page.save(draw(chosen.folder), chosen.out, name)
    except FileNotFoundError as error:
        print(f"{name}.py: {error}", file=sys.stderr)
        return 2
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    usual = "results/calibration/cpu/N=2"
    return script("calibration", __doc__, lambda folder: draw(load_calibration(folder)), usual, arguments)


if __name__ == "__main__":
    sys.exit(main())
