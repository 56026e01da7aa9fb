"""Ours against the peers: ratios with intervals for step time, peak bytes and bytes sent, and the goals.

    python -m analysis compare [FOLDER] --out DIR       (runs of experiment=compare and the like; `make compare`)

A *ratio* is our engine over a peer, at most 1 if ours needs no more. Launches of one round of a sweep are a pair;
of the pairs' ratios the geometric mean is shown with a 95 % t-interval over their logarithms, the launch being the
unit. What repeats to the byte has none. *Peak bytes* are the allocator's, which sees what libraries take in threads of
their own too: in the accounted pass, and in the timed one, where nothing delays what they free. *Bytes sent* are those
that crossed the loopback interface, over the ranks.

Writes ratios.parquet (a row a pair of cells and metric), ratios.md (the same as a table, with date and machine) and the
figure compare. A *goal* bounds the ratio of step times; it is "met" or "missed" by the mean, "within noise" where the
interval holds the bound. Other settings than the gated N are reported without a verdict. Exit code 2: nothing there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.ratios import METRICS, ratios_of, source, table
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS
from zerobench.plots.style import GRAY, PURPLE, look, rule
from zerobench.results.selection import latest
from zerobench.results.tables import Results, load

FOLDER = Path("results/compare/cpu")

PANELS = {
    "step time": ["step_s"],
    "peak bytes": ["allocator_peak_bytes", "timed_allocator_peak_bytes"],
    "bytes sent": ["loopback_bytes"],
}
"""Title of a panel -> the metrics in it."""

CAPTION = (
    "Ours over the peer: below 1 is better. Whiskers: 95 % intervals over paired launches, if wider than the mark. "
    "DeepSpeed at its defaults keeps buckets of 5e8 elements, hence its large peaks; tuned has 25 MiB."
)
GOAL, GOAL_WIDTH, SHIFT = PURPLE, 2.2, 0.16
"""Color and width of a goal's mark; how far two metrics of one pair lie from its row."""


def read(folder: Path) -> Results:
    """Returns the newest runs of each cell. Raises ValueError, or FileNotFoundError, if there is nothing to compare."""
    results, _ = load(folder).chosen((), everything=False)
    if not any(one.pairs for one in ratios_of(results)):
        raise ValueError(f"nothing to compare in {folder}; `make compare` makes it")
    return results


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """A row a setting: a point and interval for every pair, step time, peak and bytes sent side by side."""
    ratios = ratios_of(results)
    settings = [[one for one in ratios if one.setting == name] for name in dict.fromkeys(r.setting for r in ratios)]
    frames = [pd.DataFrame(map(asdict, mine)) for mine in settings]
    rows = max((len(frame) // len(METRICS) for frame in frames), default=1)
    figure, places = sheet(frames, panels, (2.3, 0.1 + 0.155 * rows), CAPTION, across=len(PANELS))
    for row, frame in places:
        row[0].set_title(frame["setting"].iloc[0], loc="left")
        for number, (axes, (words, metrics)) in enumerate(zip(row, PANELS.items(), strict=True)):
            if number and not axes.get_subplotspec().is_first_col():  # else the panels are one below the other
                axes.tick_params(left=False, labelleft=False)
                if frame.loc[frame["metric"].isin(metrics), "ratio"].isna().all():
                    _give_place(axes, row[number - 1])
                    continue
            _draw_metrics(axes, [frame[frame["metric"] == metric] for metric in metrics])
            axes.set_xlabel("\n".join([words, *_notes(frame[frame["metric"].isin(metrics)])]))
    timed = rule("peak in the timed pass", "", marker="o", fillstyle="none", color=GRAY)
    handles = [rule("as much as the peer", lw=0.8), rule("goal, set before the runs", color=GOAL, lw=GOAL_WIDTH), timed]
    key(figure, handles)
    return figure


def _give_place(axes: Axes, left: Axes) -> None:
    """Removes a panel of metrics that the setting has not measured, and widens its neighbor to the left."""
    mine, other = axes.get_subplotspec(), left.get_subplotspec()
    assert mine is not None
    assert other is not None
    left.set_subplotspec(mine.get_gridspec()[mine.rowspan.start, other.colspan.start : mine.colspan.stop])
    axes.remove()


def _draw_metrics(axes: Axes, parts: Sequence[pd.DataFrame]) -> None:
    """A row per pair of cells; of several metrics the first is filled and above."""
    for number, mine in enumerate(parts):
        shift = SHIFT * (2 * number - len(parts) + 1)
        for place, one in enumerate(mine.itertuples()):
            if pd.notna(one.ratio):
                _draw_ratio(axes, place, shift, one, "none" if number else "full")
    mine = pd.concat(parts)
    pairs = [f"{one.ours} / {one.peer}" for one in parts[0].itertuples()]
    lacking = [place for place in range(len(pairs)) if all(pd.isna(part["ratio"].iloc[place]) for part in parts)]
    if len(lacking) == len(pairs):
        words = "\n".join(sorted(set(mine["verdict"])))
        axes.set_axis_off()
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", style="italic")
    else:
        axes.axvline(1, color="black", lw=0.8, zorder=1)
        for place in lacking:
            axes.annotate("× none", (1, place), (4, -3), textcoords="offset points", fontsize="small", style="italic")
    axes.set_yticks(range(len(pairs)), pairs, fontsize="small")
    axes.set_ylim(len(pairs) - 0.4, -0.6)
    axes.set_xlim(0, min(2.5, max(1.25, 1.08 * float(mine["high"].fillna(mine["ratio"]).max()))))
    axes.grid(axis="x", alpha=0.3)


def _draw_ratio(axes: Axes, place: int, shift: float, one: Any, fill: str) -> None:
    how = look(str(one.ours).split()[0])
    reach = None if pd.isna(one.low) else [[one.ratio - one.low], [one.high - one.ratio]]
    axes.errorbar([one.ratio], [place + shift], xerr=reach, color=how.color, marker=how.marker, ms=4, capsize=2, lw=1,
                  fillstyle=fill)  # fmt: skip
    if pd.notna(one.goal):
        axes.vlines(one.goal, place - 0.4, place + 0.4, color=GOAL, lw=GOAL_WIDTH, zorder=1.5)


def _notes(mine: pd.DataFrame) -> list[str]:
    """Says of a panel where intervals or goals are missing."""
    there = mine[mine["ratio"].notna()]
    bare = there["low"].isna()
    notes = ["(no intervals: one launch)" if bare.all() else "(some without interval: one launch)"] * bool(bare.any())
    if (mine["metric"] == "step_s").any() and mine["goal"].isna().all():
        notes.append(f"(no goals at N = {mine['world_size'].iloc[0]})")
    return notes


def write_tables(results: Results, out: Path) -> None:
    """Writes the ratios as ratios.parquet and ratios.md, and prints them."""
    ratios = ratios_of(results)
    pd.DataFrame(map(asdict, ratios)).to_parquet(out / "ratios.parquet", index=False)
    text = f"{table(ratios)}\n\n{source(latest(results.runs), ratios)}\n"
    (out / "ratios.md").write_text(text)
    print(text)


FIGURES = {"compare": draw}
