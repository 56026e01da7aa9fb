"""Paired comparison of times, and noise floors of machines.

Launch i of A and launch i of B are a *pair*; its ratio is B's time over A's. The geometric mean of the pairs' ratios is
reported, with a 95 % t-interval over the logarithms. An *effect* is the distance of a ratio from 1, the same for double
and half: max(r, 1/r) − 1. A *threshold* is the larger of the smallest relevant effect and the noise floor of identical
code. *Slower* and *faster* need both: an interval without 1, which rules out chance within these launches, and an
effect above the threshold, which rules out variation that such an interval does not include.

There is a verdict only if launches were *interleaved*, both of a pair before any of the next. Measured one after the
other, A and B also differ by the machine's drift: identical code is called slower or faster in 31 of 100 cases at a
drift of 3 %, and in 72 at 10 %.

[Note: noise floors]
A *launch's time* is the median of its steps. For launches of one cell, s is the standard deviation of the times'
logarithms. The *floor* is the effect that the ratio of two further launches of identical code stays below in 95 % of
cases: exp(t · s · √2) − 1, with Student's t for n − 1 degrees of freedom. This is the prediction interval of a
difference of two. It uses every launch once, so no pairing has to be chosen; with few launches it is wide. For the mean
over k pairs, s is smaller by √k: `NoiseFloor.of`. Records are kept per *environment*: device class, processor, cores
and torch's minor version.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy import stats

from ..config.cell import CellConfig
from ..config.flat import base_name
from ..config.yaml_file import read_yaml
from ..results.provenance import torch_minor
from ..results.summary import LEAST_LAUNCHES, TIMES, geometric_interval

CONFIDENCE = 0.95
ENVIRONMENT = ("device_class", "processor", "cores", "torch")

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
    return len(pairs) > 1 and all(span[1] < following[0] for span, following in pairwise(spans))


def effects(pairs: list[Pair], minimum: float, floors: list[NoiseFloor]) -> list[Effect]:
    """Returns one Effect per time. A floor shrinks with the number of pairs, since drift affects A and B alike."""
    judged, changes = interleaved(pairs) or same_runs(pairs), []
    for metric in TIMES:
        threshold = max([minimum, *(floor.of(metric, len(pairs) if judged else 1) for floor in floors)])
        change = effect_of(metric, [a[metric] for a, _ in pairs], [b[metric] for _, b in pairs], threshold)
        changes.append(change if judged else replace(change, verdict=UNJUDGED))
    return changes


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
    is_noise = max(ratio, 1 / ratio) - 1 <= threshold or (low is not None and high is not None and low <= 1 <= high)
    verdict = NOISE if is_noise else UNDECIDED if low is None else SLOWER if ratio > 1 else FASTER
    return Effect(metric, float(stats.gmean(a)), float(stats.gmean(b)), ratio, low, high, threshold, verdict)


# -- noise floors -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoiseFloor:
    """One record. `floors`: a time's column -> the floor of one pair. `medians`: the launches' times, in seconds."""

    environment: dict[str, Any]
    cell: str
    date: str
    command: str
    commit: str | None
    floors: dict[str, float]
    medians: dict[str, list[float]]

    def of(self, metric: str, pairs: int = 1) -> float:
        """Returns the floor of the geometric mean over `pairs` pairs."""
        return float(np.expm1(np.log1p(self.floors[metric]) / np.sqrt(pairs)))

    @property
    def launches(self) -> int:
        """The number of launches of the measurement."""
        return len(next(iter(self.medians.values())))

    @property
    def title(self) -> str:
        """The measured cell and date."""
        return f"{self.cell}, {self.launches} launches of {self.date}"


def environment_of(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a run's row that determines which record applies to it."""
    return {
        "device_class": row["device_class"],
        "processor": row["processor"],
        "cores": int(row["cores"]),
        "torch": torch_minor(row["torch_version"]),
    }


def floor_of(times: list[float]) -> float:
    """Returns the floor of one pair, from the times of at least two launches."""
    spread = float(np.std(np.log(times), ddof=1))
    return float(np.expm1(stats.t.ppf((1 + CONFIDENCE) / 2, len(times) - 1) * spread * np.sqrt(2)))


def floor_from(launches: list[dict[str, Any]], config: CellConfig) -> NoiseFloor:
    """Returns the record of a cell's launches, all of them ok. Raises ValueError if there are too few."""
    if len(launches) < LEAST_LAUNCHES:
        raise ValueError(f"{base_name(config)} has {len(launches)} launches; a noise floor needs {LEAST_LAUNCHES}")
    medians = {metric: [float(row[metric]) for row in launches] for metric in TIMES}
    last = launches[-1]
    return NoiseFloor(
        environment=environment_of(last),
        cell=base_name(config),
        date=last["started"][:10],
        command=last["command"],
        commit=last["commit"],
        floors={metric: floor_of(times) for metric, times in medians.items()},
        medians=medians,
    )


def read_floors(folder: Path) -> list[NoiseFloor]:
    """Reads all records in a folder; none if the folder does not exist. Raises ValueError for a file with other
    content.
    """
    return [floor for path in sorted(folder.glob("*.yaml")) for floor in _read_file(path)]


def write_floor(folder: Path, floor: NoiseFloor) -> Path:
    """Adds a record to its device class's file, replacing an earlier one of the same environment."""
    name = re.sub(r"[^a-z0-9]+", "-", floor.environment["device_class"].lower()).strip("-")
    path = folder / f"{name}.yaml"
    earlier = _read_file(path) if path.is_file() else []
    floors = [*(other for other in earlier if other.environment != floor.environment), floor]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(list(map(asdict, floors)), sort_keys=False, allow_unicode=True))
    return path


def lookup(floors: list[NoiseFloor], environment: dict[str, Any]) -> NoiseFloor | None:
    """Returns the record that applies to an environment."""
    return next((floor for floor in floors if floor.environment == environment), None)


def _read_file(path: Path) -> list[NoiseFloor]:
    try:
        floors = [NoiseFloor(**record) for record in read_yaml(path) or []]
        for floor in floors:
            if set(floor.environment) != set(ENVIRONMENT) or set(floor.floors) != set(TIMES):
                raise TypeError(f"{floor.cell}: environment needs {', '.join(ENVIRONMENT)}, floors {', '.join(TIMES)}")
            medians = floor.medians.values() if isinstance(floor.medians, dict) else [None]
            if not all(isinstance(times, list) and times for times in medians):
                raise TypeError(f"{floor.cell}: medians must be lists of seconds")
            numbers = [*floor.floors.values(), *(seconds for times in medians for seconds in times)]
            if not medians or not all(type(number) in (int, float) and number >= 0 for number in numbers):
                raise TypeError(f"{floor.cell}: floors and medians must be numbers from 0 on")
    except TypeError as error:
        raise ValueError(f"{path}: no record of noise floors: {error}") from error
    return floors
