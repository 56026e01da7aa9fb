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

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zerobench.budgets.comparison import effect_of, interleaved, pair_up
from zerobench.plots.marks import GRAY, PURPLE, look, rule
from zerobench.plots.page import key, sheet
from zerobench.plots.panels import MOST_PANELS, comparisons, title
from zerobench.results.grid import Grid
from zerobench.results.selection import latest
from zerobench.results.tables import Results, load

FOLDER = Path("results/compare/cpu")

# -- the ratios ---------------------------------------------------------------------------------------------

METRICS = {
    "step_s": "step time",
    "allocator_peak_bytes": "peak bytes",
    "timed_allocator_peak_bytes": "peak bytes, timed",
    "loopback_bytes": "bytes sent",
}

GATED_RANKS = 2
"""Four ranks on two cores say little of four ranks."""

LARGE_PSI = 30_000_000


@dataclass(frozen=True)
class Goal:
    """The step time of `ours` is at most `most` times that of `peer`, for large models at most `large` times."""

    ours: str
    peer: str
    most: float | None
    large: float | None = None

    def bound(self, psi: int) -> float | None:
        """For a model of `psi` parameters."""
        return self.large if self.large is not None and psi >= LARGE_PSI else self.most


GOALS = (
    Goal("zero1", "ddp", 1.00),
    Goal("zero1", "zero_redundancy", 1.00),
    Goal("zero1", "deepspeed_zero1", 0.85),
    Goal("zero2", "ddp", 1.00),
    Goal("zero2", "fsdp2_no_reshard", 0.85),
    Goal("zero2", "deepspeed_zero2", 0.85),
    Goal("zero3", "ddp", None),
    Goal("zero3", "fsdp2", 0.80, large=0.70),
    Goal("zero3", "deepspeed_zero3", 0.85),
)
"""Pairs that are compared. A goal holds against the peer at its defaults and tuned."""


@dataclass(frozen=True)
class Ratio:
    """One metric of our engine over a peer's, in one setting; NaN if a side has no figure. `goal`: at most."""

    setting: str
    model: str
    psi: int
    world_size: int
    ours: str
    peer: str
    metric: str
    ratio: float
    low: float
    high: float
    pairs: int
    interleaved: bool
    goal: float
    verdict: str


def ratios_of(results: Results) -> list[Ratio]:
    """Every goal's pairs of cells, setting by setting, a row a metric."""
    panels = comparisons(results)
    launches = {str(cell): rows.to_dict("records") for cell, rows in latest(results.runs).groupby("cell_id")}
    return [
        ratio
        for cells in panels
        for goal in GOALS
        for ours in cells[cells["strategy"] == goal.ours].itertuples()
        for peer in cells[cells["strategy"] == goal.peer].itertuples()
        for ratio in _compare(title(cells, panels), goal, ours, peer, launches)
    ]


def _compare(setting: str, goal: Goal, ours: Any, peer: Any, launches: dict[str, list[Any]]) -> Iterator[Ratio]:
    ok = ours.status == peer.status == "ok"
    psi = next((int(cell.psi) for cell in (ours, peer) if pd.notna(cell.psi)), 0)
    pairs = pair_up(launches[peer.cell_id], launches[ours.cell_id]) if ok else []
    for metric in METRICS:
        bound = goal.bound(psi) if metric == "step_s" and ours.world_size == GATED_RANKS else None
        both = [pair for pair in pairs if all(pd.notna(side[metric]) for side in pair)]
        ratio, low, high, verdict = (
            math.nan,
            math.nan,
            math.nan,
            f"{ours.label} {ours.status}, {peer.label} {peer.status}",
        )
        if both:
            effect = effect_of(metric, [a[metric] for a, _ in both], [b[metric] for _, b in both], 0.0)
            ratio, low, high = effect.ratio, *(math.nan if v is None else v for v in (effect.low, effect.high))
            verdict = judge(ratio, low, high, bound)
        elif ok:
            verdict = "not measured here"
        yield Ratio(
            setting, ours.model, psi, int(ours.world_size), ours.label, peer.label, metric, ratio, low, high,
            len(both), interleaved(pairs), math.nan if bound is None else bound, verdict,
        )  # fmt: skip


def judge(ratio: float, low: float, high: float, bound: float | None) -> str:
    """The word for a ratio with its interval against a bound; empty if there is none."""
    if bound is None:
        return ""
    word = "met" if ratio <= bound else "missed"
    unsure = pd.isna(low) or low <= bound < high
    return f"{word}, no interval" if pd.isna(low) else f"{word}, within noise" if unsure else word


# -- the tables ----------------------------------------------------------------------------------------------


def read(folder: Path) -> Results:
    """Returns the newest runs of each cell. Raises ValueError, or FileNotFoundError, if there is nothing to compare."""
    results, _ = load(folder).chosen((), everything=False)
    if not any(one.pairs for one in ratios_of(results)):
        raise ValueError(f"nothing to compare in {folder}; `make compare` makes it")
    return results


def table(ratios: Sequence[Ratio]) -> str:
    """Markdown: a row a pair of cells, under a heading for each setting."""
    lines: list[str] = []
    for setting, of_setting in groupby(ratios, lambda ratio: ratio.setting):
        rows = []
        for (ours, peer), metrics in groupby(of_setting, lambda ratio: (ratio.ours, ratio.peer)):
            step, *others = metrics
            goal = "–" if pd.isna(step.goal) else f"≤ {step.goal:.2f}"
            rows.append([f"{ours} / {peer}", *map(_show, (step, *others)), goal, step.verdict or "–"])
        grid = Grid(["ours / peer", *METRICS.values(), "goal", "verdict"], rows, ("ours / peer", "verdict"))
        lines += [f"**{setting}**", "", grid.markdown(is_markdown=True)]
    return "\n".join(lines).rstrip()


def _show(ratio: Ratio) -> str:
    if pd.isna(ratio.ratio):
        return "–"
    is_exact = pd.isna(ratio.low) or ratio.high - ratio.low < 0.0005
    return f"{ratio.ratio:.3f}" + ("" if is_exact else f" ({ratio.low:.3f}–{ratio.high:.3f})")


def source(runs: pd.DataFrame, ratios: Sequence[Ratio]) -> str:
    """Where and when, how many launches, and what could not be measured."""
    ok = runs[runs["status"] == "ok"]
    first = ok.iloc[0]
    days = sorted({str(started)[:10] for started in ok["started"]})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    most = max((one.pairs for one in ratios), default=0)
    pairs = [one for one in ratios if one.pairs > 1]
    order = "interleaved" if all(one.interleaved for one in pairs) else "not interleaved, so drift counts as change"
    processors = " and ".join(sorted(set(ok["processor"])))
    words = f"{first.device_class}, {processors}, {first.cores} cores, torch {first.torch_version}, {when}; "
    words += f"up to {most} launches per cell, {order}; {first.threads} thread(s) per rank, {first.optimizer}."
    bad = runs[runs["status"] != "ok"].drop_duplicates("cell_id")
    return "\n".join([words, *(f"\n{row.strategy}, N = {row.world_size}: {row.reason}" for row in bad.itertuples())])


def write_tables(results: Results, out: Path) -> None:
    """Writes the ratios as ratios.parquet and ratios.md, and prints them."""
    ratios = ratios_of(results)
    pd.DataFrame(map(asdict, ratios)).to_parquet(out / "ratios.parquet", index=False)
    text = f"{table(ratios)}\n\n{source(latest(results.runs), ratios)}\n"
    (out / "ratios.md").write_text(text)
    print(text)


# -- the figure ----------------------------------------------------------------------------------------------

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


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """A row a setting: a point and interval for every pair, step time, peak and bytes sent side by side."""
    ratios = pd.DataFrame(map(asdict, ratios_of(results)))
    frames = [frame for _, frame in ratios.groupby("setting", sort=False)]
    rows = max((len(frame) // len(METRICS) for frame in frames), default=1)
    figure, grid = sheet(frames, panels, (2.3, 0.1 + 0.155 * rows), CAPTION, across=len(PANELS))
    for row, frame in grid:
        row[0].set_title(frame["setting"].iloc[0], loc="left")
        for number, (axes, (name, metrics)) in enumerate(zip(row, PANELS.items(), strict=True)):
            drawn = frame[frame["metric"].isin(metrics)]
            if number and not axes.get_subplotspec().is_first_col():  # else the panels are one below the other
                axes.tick_params(left=False, labelleft=False)
                if drawn["ratio"].isna().all():  # not measured in this setting: its neighbor to the left is widened
                    own, left = axes.get_subplotspec(), row[number - 1].get_subplotspec()
                    span = own.get_gridspec()[own.rowspan.start, left.colspan.start : own.colspan.stop]
                    row[number - 1].set_subplotspec(span)
                    axes.remove()
                    continue
            _draw_metrics(axes, [frame[frame["metric"] == metric] for metric in metrics])
            axes.set_xlabel("\n".join([name, *_notes(drawn)]))
    timed = rule("peak in the timed pass", "", marker="o", fillstyle="none", color=GRAY)
    handles = [rule("as much as the peer", lw=0.8), rule("goal, set before the runs", color=GOAL, lw=GOAL_WIDTH), timed]
    key(figure, handles)
    return figure


def _draw_metrics(axes: Axes, parts: Sequence[pd.DataFrame]) -> None:
    """A row per pair of cells; of several metrics the first is filled and above."""
    for number, part in enumerate(parts):
        shift = SHIFT * (2 * number - len(parts) + 1)
        for y, ratio in enumerate(part.itertuples()):
            if pd.isna(ratio.ratio):
                continue
            style = look(str(ratio.ours).split()[0])
            reach = None if pd.isna(ratio.low) else [[ratio.ratio - ratio.low], [ratio.high - ratio.ratio]]
            axes.errorbar(
                [ratio.ratio], [y + shift], xerr=reach, color=style.color, marker=style.marker, ms=4, capsize=2, lw=1,
                fillstyle="none" if number else "full",
            )  # fmt: skip
            if pd.notna(ratio.goal):
                axes.vlines(ratio.goal, y - 0.4, y + 0.4, color=GOAL, lw=GOAL_WIDTH, zorder=1.5)
    rows = pd.concat(parts)
    pairs = [f"{ratio.ours} / {ratio.peer}" for ratio in parts[0].itertuples()]
    lacking = [y for y in range(len(pairs)) if all(pd.isna(part["ratio"].iloc[y]) for part in parts)]
    if len(lacking) == len(pairs):
        verdicts = "\n".join(sorted(set(rows["verdict"])))
        axes.set_axis_off()
        axes.text(0.5, 0.5, verdicts, transform=axes.transAxes, ha="center", va="center", style="italic")
    else:
        axes.axvline(1, color="black", lw=0.8, zorder=1)
        for y in lacking:
            axes.annotate("× none", (1, y), (4, -3), textcoords="offset points", fontsize="small", style="italic")
    axes.set_yticks(range(len(pairs)), pairs, fontsize="small")
    axes.set_ylim(len(pairs) - 0.4, -0.6)
    axes.set_xlim(0, min(2.5, max(1.25, 1.08 * float(rows["high"].fillna(rows["ratio"]).max()))))
    axes.grid(axis="x", alpha=0.3)


def _notes(ratios: pd.DataFrame) -> list[str]:
    """Says of a panel where intervals or goals are missing."""
    bare = ratios.loc[ratios["ratio"].notna(), "low"].isna()
    notes = ["(no intervals: one launch)" if bare.all() else "(some without interval: one launch)"] * bool(bare.any())
    if (ratios["metric"] == "step_s").any() and ratios["goal"].isna().all():
        notes.append(f"(no goals at N = {ratios['world_size'].iloc[0]})")
    return notes


FIGURES = {"compare": draw}
