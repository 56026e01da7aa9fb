"""Maps of predicted steps, from the tables of `python -m validation predicted-maps`.

    python -m analysis predicted_maps [FOLDER] --out DIR

Left: the fastest strategy of what fits, over parameters and ranks; in each field its tokens/s per GPU. Right: tokens/s
per GPU of one model over the ranks, by strategy, if its states fit.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from validation.predicted_maps import MODELS
from zerobench.plots.marks import look
from zerobench.plots.page import Sheet, key

FOLDER = Path("results/predicted_maps")

MODEL = "gpt2_1_5b"

CAPTION = (
    "Predicted on H100 nodes with 3,200 Gbit/s: bf16, AdamW, blocks recomputed, 4 × 1,024 tokens per GPU. "
    "Differences below the interval of the predictions are ties."
)


def read(folder: Path) -> pd.DataFrame:
    """Returns the table of steps. Raises OSError if there is none."""
    return pd.read_csv(folder / "steps.csv")


def draw(steps: pd.DataFrame) -> Sheet:
    """The map of the fastest strategy, and the scaling of one model."""
    figure = Sheet(1, 2.2, CAPTION)
    left, right = figure.subplots(1, 2)
    _map(left, steps)
    _scaling(right, steps[steps["model"] == MODEL])
    key(figure, right.get_legend_handles_labels()[0])
    return figure


def _map(axes: Axes, steps: pd.DataFrame) -> None:
    sizes, ranks = sorted(steps["psi"].unique()), sorted(steps["ranks"].unique())
    fastest = steps.loc[steps.groupby(["psi", "ranks"])["step_s"].idxmin()]
    best = {(row.psi, row.ranks): row for row in fastest.itertuples()}
    asked = {psi: MODELS[model] for model, psi in zip(steps["model"], steps["psi"], strict=True)}
    for (x, count), (y, psi) in product(enumerate(ranks), enumerate(sizes)):
        row = best.get((psi, count))
        text = "nothing fits" if count in asked[psi] else "not asked"
        if row is not None:
            text, color = f"{row.strategy}\n{row.tokens_s_gpu:,.0f}", look(str(row.strategy)).color
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, alpha=0.35, edgecolor="white"))
        axes.text(x, y, text, ha="center", va="center", color="black" if row is not None else "gray")
    axes.set(xlim=(-0.5, len(ranks) - 0.5), ylim=(-0.5, len(sizes) - 0.5), xlabel="ranks", ylabel="parameters")
    axes.set_xticks(range(len(ranks)), [f"{one:,}" for one in ranks])
    axes.set_yticks(range(len(sizes)), [f"{one / 1e9:.1f}B" for one in sizes])
    axes.set_title("fastest strategy that fits, tokens/s per GPU", loc="left")


def _scaling(axes: Axes, steps: pd.DataFrame) -> None:
    for strategy, mine in steps.groupby("strategy", sort=False):
        style = look(str(strategy))
        axes.plot(mine["ranks"], mine["tokens_s_gpu"], marker=style.marker, color=style.color,
                  label=str(strategy), clip_on=False)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(steps["ranks"].unique()), [f"{one:,}" for one in sorted(steps["ranks"].unique())])
    axes.set(xlabel="ranks", ylim=(0, None))
    axes.set_title(f"{MODEL}, tokens/s per GPU", loc="left")


STEM = "predicted_maps"
