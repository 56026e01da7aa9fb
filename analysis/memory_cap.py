"""The fastest way to train within a memory limit, by strategy."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zerobench.plots.marks import absent, unit_of
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS
from zerobench.plots.style import look, number
from zerobench.results.tables import Results

SETTING = ["model", "world_size", "batch", "sequence", "device"]
CAPTION = (
    "The fastest split of the batch within a memory limit, with 95 % intervals over launches. Above the bars: "
    "micro-batch × accumulation; r: blocks are recomputed."
)
GROUP = 0.92
"""Width of the bars of one limit together."""

HATCHES = ("", "//", "..", "\\\\", "xx", "--")
"""For bars that stand side by side."""


def memory_cap(results: Results, panels: int = MOST_PANELS) -> Figure:
    """Which stage under a memory cap? Tokens/s of each strategy's fastest way to train within a limit a rank.

    Searches (`zerobench experiment=memory_cap`) have run every split of a rank's batch into micro-batches, with and
    without recomputing blocks. Each bar is the fastest that fits, with its 95 % interval over launches; above it stands
    which that was: micro-batch × accumulation, and r where blocks are recomputed. Where nothing fits, the axis says so.
    One panel a model, world size and batch. Raises ValueError if there are no searches.
    """
    settings = [mine for _, mine in results.searches.groupby(SETTING, sort=False)]
    if not settings:
        raise ValueError("no searches in these folders; `zerobench experiment=memory_cap` makes some")
    figure, places = sheet(settings, panels, (4.0, 2.4), CAPTION)
    for axes, searches in places:
        _panel(axes, searches)
    strategies = sorted({name for searches in settings for name in searches["strategy"]})
    key(figure, [Patch(label=name, **_fill(name, place)) for place, name in enumerate(strategies)])
    return figure


def _fill(strategy: str, place: int) -> dict[str, Any]:
    """Color of the strategy; hatches tell neighbors apart without it."""
    return {"facecolor": look(strategy).color, "hatch": HATCHES[place % len(HATCHES)], "edgecolor": "white", "lw": 0.4}


def _panel(axes: Axes, searches: pd.DataFrame) -> None:
    limits = sorted(int(limit) for limit in searches["limit_bytes"].unique())
    strategies = sorted(searches["strategy"].unique())
    width = GROUP / len(strategies)
    for n, strategy in enumerate(strategies):
        mine = searches[searches["strategy"] == strategy].set_index("limit_bytes")
        for place, limit in enumerate(limits):
            at = place + (n - (len(strategies) - 1) / 2) * width
            _bar(axes, at, width, strategy, n, mine.loc[limit] if limit in mine.index else None)
    name, unit = unit_of(limits[-1])
    axes.set_xticks(range(len(limits)), [f"{limit / unit:g} {name}" for limit in limits])
    axes.set_xlim(-0.5, len(limits) - 0.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("memory limit of a rank")
    axes.set_ylabel("tokens/s, all ranks together")
    first = searches.iloc[0]
    axes.set_title(f"{first.model}, N = {first.world_size}, batch {first.batch} × {first.sequence}, {first.device}")


def _bar(axes: Axes, at: float, width: float, strategy: str, n: int, one: Any) -> None:
    """A strategy's fastest within one limit, or the word for why there is none."""
    if one is None or one.status != "found":
        absent(axes, at, f"{strategy}: {'missing' if one is None else 'nothing fits'}")
        return
    rate = top = one.tokens_per_s
    axes.bar(at, rate, 0.92 * width, label=strategy, **_fill(strategy, n))
    if pd.notna(one.tokens_per_s_low):
        top = one.tokens_per_s_high
        axes.errorbar([at], [rate], [[rate - one.tokens_per_s_low], [top - rate]], color="black", capsize=2, lw=0.8)
    recomputed = pd.notna(one.checkpointing) and one.checkpointing
    number(axes, at, top, f"{one.micro_batch}×{one.accumulation}" + " r" * bool(recomputed))
