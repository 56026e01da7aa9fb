"""Ours against the peers: ratios with intervals for step time, peak bytes and bytes sent, and the goals.

    python -m analysis compare [FOLDER] --out DIR       (runs of experiment=compare and the like; `make compare`)

A *ratio* is our engine over a peer, at most 1 if ours needs no more. Launches of one round of a sweep are a pair;
of the pairs' ratios the geometric mean is shown with a 95 % t-interval over their logarithms, the launch being the
unit. What repeats to the byte has none. *Peak bytes* are the allocator's, which sees what libraries take in threads of
their own too: in the accounted pass, and in the timed one, where nothing delays what they free. *Bytes sent* are those
that crossed the loopback interface, over the ranks.

Writes ratios.parquet (a row a pair of cells and metric) and ratios.md (the same as a table, with date and machine). A
*goal* bounds the ratio of step times; it is "met" or "missed" by the mean, "within noise" where the interval holds the
bound. Other settings than the gated N are reported without a verdict. Exit code 2: nothing there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from zerobench.budgets.comparison import interleaved, measure_effect, pair_up
from zerobench.plots.panels import comparisons, title
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
        ratio = low = high = math.nan
        verdict = f"{ours.label} {ours.status}, {peer.label} {peer.status}"
        if both:
            effect = measure_effect(metric, [a[metric] for a, _ in both], [b[metric] for _, b in both], 0.0)
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
    """Writes the ratios as parquet and, with their sources, as Markdown, which it prints."""
    ratios = ratios_of(results)
    pd.DataFrame(map(asdict, ratios)).to_parquet(out / "ratios.parquet", index=False)
    text = f"{table(ratios)}\n\n{source(latest(results.runs), ratios)}\n"
    (out / "ratios.md").write_text(text)
    print(text)
