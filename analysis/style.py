"""One style for all figures: readable in print, by the colour-blind, and without colour (hatches)."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

MIB = 2**20

# Okabe and Ito's palette, told apart by all common kinds of colour vision; hatches tell them apart in grey.
CATEGORY_STYLE = {
    "parameters": ("#0072B2", ""),
    "gradients": ("#E69F00", "//"),
    "master": ("#56B4E9", ".."),
    "optimizer": ("#009E73", "\\\\"),
    "communication": ("#D55E00", "xx"),
    "activations": ("#CC79A7", ""),
    "inputs": ("#F0E442", ""),
    "temporary": ("#999999", "--"),
}

plt.rcParams.update(
    {
        "figure.dpi": 150,
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.alpha": 0.3,
        "axes.axisbelow": True,
        "hatch.linewidth": 0.5,
        "svg.hashsalt": "zerobench",  # the same data give the same file
    }
)


def save(figure: Figure, out: Path, name: str) -> None:
    """Writes NAME.png and NAME.svg under `out` and says where."""
    out.mkdir(parents=True, exist_ok=True)
    for ending in ("png", "svg"):
        metadata = {"Date": None} if ending == "svg" else None
        figure.savefig(out / f"{name}.{ending}", bbox_inches="tight", metadata=metadata)
        print(f"figure: {out / f'{name}.{ending}'}")
    plt.close(figure)
