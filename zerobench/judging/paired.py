"""Paired comparison of times. Launch i of A and launch i of B are a *pair*; its ratio is B's time over A's.

The geometric mean of the pairs' ratios is reported, with a 95 % t-interval over the logarithms. An *effect* is the
distance of a ratio from 1, the same for double and half: max(r, 1/r) − 1. A *threshold* is the larger of the smallest
relevant effect and the noise floor of identical code (noise_floor.py). *Slower* and *faster* need both: an interval
without 1, which rules out chance within these launches, and an effect above the threshold, which rules out variation
that such an interval does not include.

There is a verdict only if launches were *interleaved*, both of a pair before any of the next. Measured one after the
other, A and B also differ by the machine's drift: identical code is called slower or faster in 31 of 100 cases at a
drift of 3 %, and in 72 at 10 %.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats

from ..results.summary import LEAST_LAUNCHES, TIMES, geometric_interval
from .noise_floor import NoiseFloor

NOISE, SLOWER, FASTER = "noise", "slower", "faster"
UNDECIDED = f"undecided: measure.repeats={LEAST_LAUNCHES} or more gives an interval"

UNJUDGED = "no verdict"
"""The verdict on launches that were not interleaved."""

POWER = 0.8
"""Probability with which an existing change should be detected."""

Pair = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class Effect:
    """The change of a time: geometric means of A and B in seconds, their ratio with its interval, and the verdict."""

    metric: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    threshold: float
    verdict: str


def pair_up(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[Pair]:
    """Pairs launches of A and B with the same number; if they have no number in common, in order."""
    ours, theirs = ({row["repeat"]: row for row in sorted(side, key=lambda r: r["repeat"])} for side in (a, b))
    both = [(row, theirs[repeat]) for repeat, row in ours.items() if repeat in theirs]
    return both or list(zip(ours.values(), theirs.values(), strict=False))


def interleaved(pairs: list[Pair]) -> bool:
    """Returns True if both launches of every pair began before any of the next pair, as in the rounds of a sweep."""
    spans = [sorted(row["started"] for row in pair) for pair in pairs]
    return len(pairs) > 1 and all(one[1] < following[0] for one, following in pairwise(spans))


def effects(pairs: list[Pair], minimum: float, floors: list[NoiseFloor]) -> list[Effect]:
    """Returns one Effect per time. A floor shrinks with the number of pairs, since drift affects A and B alike."""
    judged, found = interleaved(pairs) or same_runs(pairs), []
    for metric in TIMES:
        threshold = max([minimum, *(floor.of(metric, len(pairs) if judged else 1) for floor in floors)])
        one = effect_of(metric, [a[metric] for a, _ in pairs], [b[metric] for _, b in pairs], threshold)
        found.append(one if judged else replace(one, verdict=UNJUDGED))
    return found


def same_runs(pairs: list[Pair]) -> bool:
    """Returns True if the sides are the same runs."""
    return all((a["run_id"], a["started"]) == (b["run_id"], b["started"]) for a, b in pairs)


def detectable(pairs: list[Pair], metric: str = "step_s") -> float | None:
    """Returns the smallest effect that these pairs detect in 80 of 100 cases; None for fewer than three pairs."""
    spread = _spread(pairs, metric)
    return None if spread is None else float(np.expm1(_reach(len(pairs)) * spread))


def pairs_needed(pairs: list[Pair], effect: float, metric: str = "step_s", most: int = 1000) -> int | None:
    """Returns the number of pairs with this spread that detect the effect in 80 of 100 cases; None above `most`."""
    spread = _spread(pairs, metric)
    if spread is None:
        return None
    return next((k for k in range(LEAST_LAUNCHES, most + 1) if _reach(k) * spread <= np.log1p(effect)), None)


def _spread(pairs: list[Pair], metric: str) -> float | None:
    """Returns the standard deviation of the logarithms of the pairs' ratios."""
    if len(pairs) < LEAST_LAUNCHES:
        return None
    return float(np.std([np.log(b[metric] / a[metric]) for a, b in pairs], ddof=1))


def _reach(pairs: int) -> float:
    """Returns the distance between 1 and the smallest detected effect, in standard deviations."""
    quantiles = stats.t.ppf([0.975, POWER], pairs - 1)
    return float(quantiles.sum() / np.sqrt(pairs))


def effect_of(metric: str, a: list[float], b: list[float], threshold: float) -> Effect:
    """Computes the change of a time over pairs of launches, at least one."""
    ratios = [theirs / ours for ours, theirs in zip(a, b, strict=True)]
    ratio = float(stats.gmean(ratios))
    low, high = geometric_interval(ratios) if len(ratios) >= LEAST_LAUNCHES else (None, None)
    verdict = _verdict(ratio, low, high, threshold)
    return Effect(metric, float(stats.gmean(a)), float(stats.gmean(b)), ratio, low, high, threshold, verdict)


def _verdict(ratio: float, low: float | None, high: float | None, threshold: float) -> str:
    if max(ratio, 1 / ratio) - 1 <= threshold:
        return NOISE
    if low is None or high is None:
        return UNDECIDED
    if low <= 1 <= high:
        return NOISE
    return SLOWER if ratio > 1 else FASTER
