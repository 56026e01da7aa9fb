"""Which stage under a memory cap? Tokens/s of each strategy's fastest way to train within a limit a rank.

    python analysis/memory_cap.py [RUNS ...] --out DIR

Searches (`zerobench experiment=memory_cap`) have run every split of a rank's batch into micro-batches, with and without
recomputing blocks. Each point is the fastest that fits, with its 95 % interval over launches; beside it stands which
that was: micro-batch × accumulation, and r where blocks are recomputed. Where nothing fits, the axis says so.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import MOST_PANELS, script
from analysis.marks import absent, unit_of
from analysis.page import key, sheet
from analysis.style import look, rule
from zerobench.results.tables import Results

SETTING = ["model", "world_size", "batch", "sequence", "device"]
CAPTION = "The fastest that fits under a memory limit: micro-batch × accumulation, r: blocks are recomputed."


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """One panel a model, world size and batch. Raises ValueError where there are no searches."""
    settings = [mine for _, mine in results.searches.groupby(SETTING, sort=False)]
    if not settings:
        raise ValueError("no searches in these folders; `zerobench experiment=memory_cap` makes some")
    figure, places = sheet(settings, panels, (8, 4.6), CAPTION)
    for axes, searches in places:
        _panel(axes, searches)
    strategies = sorted({name for searches in settings for name in searches["strategy"]})
    handles = [rule(s, look(s).line, color=look(s).color, marker=look(s).marker) for s in strategies]
    key(figure, handles)
    return figure


def _panel(axes: Axes, searches: pd.DataFrame) -> None:
    limits = sorted(int(limit) for limit in searches["limit_bytes"].unique())
    strategies = sorted(searches["strategy"].unique())
    for number, strategy in enumerate(strategies):
        mine = searches[searches["strategy"] == strategy].set_index("limit_bytes")
        found = [mine.loc[limit] if limit in mine.index else None for limit in limits]
        _line(axes, strategy, found, (number - (len(strategies) - 1) / 2) * 0.16)
    name, unit = unit_of(limits[-1])
    axes.set_xticks(range(len(limits)), [f"{limit / unit:g}" for limit in limits])
    axes.set_xlim(-0.5, len(limits) - 0.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"memory limit a rank ({name})")
    axes.set_ylabel("tokens/s, all ranks together")
    first = searches.iloc[0]
    axes.set_title(f"{first.model}, N = {first.world_size}, batch {first.batch} × {first.sequence}, {first.device}")


def _line(axes: Axes, strategy: str, found: list[Any], shift: float) -> None:
    """A strategy's points, moved aside by `shift` so that those of one limit do not cover one another."""
    how = look(strategy)
    rates = [float("nan") if one is None or one.status != "found" else one.tokens_per_s for one in found]
    places = [place + shift for place in range(len(found))]
    axes.plot(places, rates, color=how.color, marker=how.marker, linestyle=how.line, lw=0.9, ms=6, label=strategy)
    for place, rate, one in zip(places, rates, found, strict=True):
        if pd.isna(rate):
            word = "missing" if one is None else "nothing fits"
            absent(axes, place, f"{strategy}: {word}", how.color)
            continue
        if pd.notna(one.tokens_per_s_low):
            low, high = rate - one.tokens_per_s_low, one.tokens_per_s_high - rate
            axes.errorbar([place], [rate], [[low], [high]], color=how.color, capsize=2, lw=0.7)
        words = f"{one.micro_batch}×{one.accumulation}" + " r" * bool(pd.notna(one.checkpointing) and one.checkpointing)
        axes.annotate(words, (place, rate), (0, 7), textcoords="offset points", ha="center", fontsize="small",
                      color=how.color, bbox={"facecolor": "white", "alpha": 0.7, "pad": 0.3, "lw": 0})  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("memory_cap", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
