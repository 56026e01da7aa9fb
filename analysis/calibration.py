"""Bandwidth of each collective by the size of the full tensor, as `zerobench calibrate` measured it.

    python -m analysis calibration [FOLDER] --out DIR

Points are medians of the slowest rank's times, whiskers their quartiles, lines the fit: latency and bandwidth. The
engine's own collectives next to torch's, and a copy in memory as the ceiling.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from zerobench.plots.marks import rule
from zerobench.plots.page import Sheet, key
from zerobench.ranks.collectives import Calibration, load_calibration
from zerobench.records.palette import BLUE, GRAY, ORANGE
from zerobench.sizes import show_bytes

LOOKS = {"seam": (BLUE, "o", "ours"), "torch": (ORANGE, "s", "torch"), "memory": (GRAY, "", "copy in memory")}
MIB, GIB = 2**20, 2**30
FOLDER = Path("results/calibration/cpu/N=2")


def draw(calibration: Calibration) -> Sheet:
    """A panel a collective."""
    transfers, provenance = calibration.transfers, calibration.provenance
    names = [name for name in transfers["collective"].unique() if name != "copy"]
    first = transfers.iloc[0]
    machine = f"{provenance['device_class']}, {provenance['cores']} cores, torch {provenance['versions']['torch']}"
    caption = f"Size over time, N = {first.world_size}, {first['dtype']}, {machine}, {provenance['date'][:10]}. "
    figure = Sheet(1, 2.0, f"{caption}Whiskers: quartiles. {_at_largest(transfers, names)}")
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        for via, (color, marker, _) in LOOKS.items():
            _draw_curve(axes, calibration, via, "copy" if via == "memory" else name, color, marker)
        sizes = sorted(transfers["bytes"].unique())[::2]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.set_xticks([size / MIB for size in sizes], [show_bytes(size).replace(".0 ", " ") for size in sizes])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="full tensor", title=name)
    figure.axes[0].set_ylabel("size / time (GiB/s)")
    drawn = [LOOKS[via] for via in LOOKS if (transfers["via"] == via).any()]
    lines = [rule(name, "-" if marker else "--", color=color, marker=marker, ms=4) for color, marker, name in drawn]
    key(figure, lines)
    return figure


def _at_largest(transfers: pd.DataFrame, names: list[str]) -> str:
    """A sentence that compares the engine's rates with torch's, at the largest size."""
    size = transfers["bytes"].max()
    most = transfers[transfers["bytes"] == size]
    rates = size / most.groupby(["collective", "via"])["seconds"].median() / GIB
    both = [name for name in names if {(name, "seam"), (name, "torch")} <= set(rates.index)]
    pairs = ", ".join(f"{name} {rates[name, 'seam']:.1f} and {rates[name, 'torch']:.1f}" for name in both)
    return f"At {show_bytes(size)}, ours and torch in GiB/s: {pairs}." if both else ""


def _draw_curve(axes: Axes, calibration: Calibration, via: str, collective: str, color: str, marker: str) -> None:
    rows = calibration.transfers
    rows = rows[(rows["via"] == via) & (rows["collective"] == collective)]
    if rows.empty:
        return
    for size, same in rows.groupby("bytes"):
        low, middle, high = size / np.quantile(same["seconds"].tolist(), [0.75, 0.5, 0.25]) / GIB
        reach = [[middle - low], [high - middle]]
        axes.errorbar([size / MIB], [middle], reach, color=color, marker=marker or "_", ms=4, capsize=3, lw=1)
    sizes = np.geomspace(rows["bytes"].min(), rows["bytes"].max(), 60)
    fit = calibration.fit(collective, int(rows["world_size"].iloc[0]), via)
    times = np.array([fit.seconds(size) for size in sizes])
    axes.plot(sizes / MIB, sizes / times / GIB, color=color, lw=1, ls="-" if marker else "--")


read = load_calibration
STEM = "calibration"
