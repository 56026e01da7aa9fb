"""Ratios of our engine over a peer, with intervals and the verdict on a goal: the numbers of compare.py.

A *ratio* is at most 1 if ours needs no more. Launches of one round of a sweep are a pair; of the pairs' ratios there
is the geometric mean with a 95 % t-interval over their logarithms, the launch being the unit. A *goal* bounds the ratio
of step times: it is "met" or "missed" by the mean, "within noise" where the interval holds the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from zerobench.judging.paired import effect_of, interleaved, pair_up
from zerobench.plots.panels import comparisons, title
from zerobench.results.selection import latest
from zerobench.results.tables import Results

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
    runs = latest(results.runs)
    found = []
    for cells in panels:
        setting = title(cells, panels)
        launches = {str(i): mine.to_dict("records") for i, mine in runs.groupby("cell_id")}
        for goal in GOALS:
            for one in _named(cells, goal.ours):
                for other in _named(cells, goal.peer):
                    found += list(_compare(setting, goal, one, other, launches))
    return found


def _named(cells: pd.DataFrame, strategy: str) -> list[Any]:
    return list(cells[cells["strategy"] == strategy].itertuples())


def _compare(setting: str, goal: Goal, ours: Any, peer: Any, launches: dict[str, list[Any]]) -> Iterator[Ratio]:
    nan = float("nan")
    ok = ours.status == peer.status == "ok"
    psi = next((int(one.psi) for one in (ours, peer) if pd.notna(one.psi)), 0)
    pairs = pair_up(launches[peer.cell_id], launches[ours.cell_id]) if ok else []
    for metric in METRICS:
        bound = goal.bound(psi) if metric == "step_s" and ours.world_size == GATED_RANKS else None
        both = [pair for pair in pairs if all(pd.notna(side[metric]) for side in pair)]
        ratio, low, high, verdict = nan, nan, nan, f"{ours.label} {ours.status}, {peer.label} {peer.status}"
        if both:
            effect = effect_of(metric, [a[metric] for a, _ in both], [b[metric] for _, b in both], 0.0)
            ratio, low, high = effect.ratio, *(nan if v is None else v for v in (effect.low, effect.high))
            verdict = judge(ratio, low, high, bound)
        elif ok:
            verdict = "not measured here"
        yield Ratio(
            setting, ours.model, psi, int(ours.world_size), ours.label, peer.label, metric, ratio, low, high,
            len(both), interleaved(pairs), nan if bound is None else bound, verdict,
        )  # fmt: skip


def judge(ratio: float, low: float, high: float, bound: float | None) -> str:
    """The word for a ratio with its interval against a bound; empty if there is none."""
    if bound is None:
        return ""
    word = "met" if ratio <= bound else "missed"
    unsure = pd.isna(low) or low <= bound < high
    return f"{word}, no interval" if pd.isna(low) else f"{word}, within noise" if unsure else word


def table(ratios: Sequence[Ratio]) -> str:
    """Markdown: a row a pair of cells, under a heading for each setting."""
    lines: list[str] = []
    for setting in dict.fromkeys(one.setting for one in ratios):
        mine = [one for one in ratios if one.setting == setting]
        lines += [f"**{setting}**", "", "| ours / peer | " + " | ".join(METRICS.values()) + " | goal | verdict |"]
        lines += ["| --- |" + " --: |" * (len(METRICS) + 1) + " --- |"]
        for ours, peer in dict.fromkeys((one.ours, one.peer) for one in mine):
            step, *rest = [one for one in mine if (one.ours, one.peer) == (ours, peer)]
            shown = [_show(one) for one in (step, *rest)]
            goal = "–" if pd.isna(step.goal) else f"≤ {step.goal:.2f}"
            lines.append("| " + " | ".join([f"{ours} / {peer}", *shown, goal, step.verdict or "–"]) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _show(one: Ratio) -> str:
    if pd.isna(one.ratio):
        return "–"
    exact = pd.isna(one.low) or one.high - one.low < 0.0005
    return f"{one.ratio:.3f}" + ("" if exact else f" ({one.low:.3f}–{one.high:.3f})")


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
