"""Memory per strategy, stacked by category, with the prediction marked.

    python analysis/memory.py [RUNS] --out DIR

Two bars a strategy: the model states (and what is in flight) at their own maximum, which formulas bind;
and everything at the instant of the overall peak. Each on the rank that needs most. One panel for
each set of runs that differ in the strategy alone; a cell that failed is drawn as such.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.style import CATEGORY_STYLE, MIB, save
from zerobench import Results, load
from zerobench.records import CATEGORIES, STATES
from zerobench.tables import latest

SETTING = ["model", "world_size", "batch", "sequence", "device", "precision", "optimizer", "data"]


def stacks(results: Results, run: pd.Series) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by category: at the states' maximum, and at the peak; each on the rank where it is largest."""
    memory = results.memory[(results.memory.run_id == run.run_id) & (results.memory.phase == "step")]

    def of_rank_with_most(total: str, column: str, categories: tuple[str, ...]) -> dict[str, int]:
        rank = memory[memory.category == total].sort_values("max_bytes").iloc[-1]["rank"]
        mine = memory[memory["rank"] == rank].set_index("category")[column]
        return {category: int(mine[category]) for category in categories}

    return (
        of_rank_with_most("states", "at_states_peak_bytes", STATES),
        of_rank_with_most("total", "at_peak_bytes", CATEGORIES),
    )


def draw_panel(axes: Axes, results: Results, runs: pd.DataFrame) -> None:
    """One panel: runs that differ in the strategy alone."""
    for place, (_, run) in enumerate(runs.iterrows()):
        if run.status != "ok":
            axes.text(
                place, 0.02, run.status, rotation=90, ha="center", style="italic", transform=axes.get_xaxis_transform()
            )
            continue
        for shift, parts in zip((-0.2, 0.2), stacks(results, run), strict=True):
            bottom = 0.0
            for category, size in parts.items():
                colour, hatch = CATEGORY_STYLE[category]
                axes.bar(
                    place + shift,
                    size / MIB,
                    0.36,
                    bottom,
                    color=colour,
                    hatch=hatch,
                    edgecolor="white",
                    lw=0.4,
                )
                bottom += size / MIB
            axes.annotate(f"{bottom:.0f}", (place + shift, bottom), ha="center", va="bottom", fontsize=7)
        span = (place - 0.4, place)
        axes.hlines(run.predicted_states_bytes / MIB, *span, color="black", lw=1.6)
        axes.hlines(run.floor_states_bytes / MIB, *span, color="black", lw=1.2, linestyles=":")
    axes.set_xticks(range(len(runs)), list(runs.strategy))
    axes.set_xlim(-0.5, len(runs) - 0.5)
    axes.set_ylabel("MiB on the fullest rank")
    first = runs.iloc[0]
    psi = f", ψ = {int(first.psi) / 1e6:.1f} M" if not pd.isna(first.psi) else ""
    axes.set_title(
        f"{first.model}, N = {first.world_size}, batch {first.batch} × {first.sequence}, {first.device}{psi}"
    )


def legend() -> list:
    """Categories, then the two lines."""
    patches = [Patch(facecolor=c, hatch=h, edgecolor="white", label=name) for name, (c, h) in CATEGORY_STYLE.items()]
    predicted = plt.Line2D([], [], color="black", lw=1.6, label="states predicted, with what is in flight")
    floor = plt.Line2D([], [], color="black", lw=1.2, ls=":", label="states by the paper's formula alone")
    return [*patches, predicted, floor]


def main() -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="?", default="results/reference/cpu/stages", help="a results folder (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/figures"),
        help="folder for the figure (default: %(default)s)",
    )
    chosen = parser.parse_args()
    try:
        results = load(chosen.runs)
    except (FileNotFoundError, ValueError) as error:
        print(f"memory.py: {error}", file=sys.stderr)
        return 2
    groups = [runs for _, runs in latest(results.runs).groupby(SETTING, sort=False, dropna=False)]
    if not groups:
        print(f"memory.py: {chosen.runs} holds no runs", file=sys.stderr)
        return 2
    widest = max(len(runs) for runs in groups)
    size = (2.2 + 1.5 * widest, 3.6 * len(groups))
    figure, panels = plt.subplots(len(groups), 1, figsize=size, squeeze=False, layout="constrained")
    for axes, runs in zip(panels[:, 0], groups, strict=True):
        draw_panel(axes, results, runs)
    figure.suptitle("Left bar: model states at their maximum. Right bar: everything at the peak.", fontsize=8, x=0.4)
    figure.legend(handles=legend(), loc="outside center right", fontsize=7, frameon=False)
    save(figure, chosen.out, "memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
