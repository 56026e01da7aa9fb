"""Compares two *sides*, A and B: sets of runs, in which the newest launches of each cell count.

A *pair of cells* consists of one cell of each side. Its fields are of three kinds. *Work* fields determine the
training: if they differ, nothing is comparable. *Condition* fields affect one kind of metric: the number of cores
affects times, the seed affects losses. All others, such as the strategy or the source, are the subject of the
comparison.

*Exact* metrics are bytes and volumes, which launches of identical code repeat to the byte, so any difference is a
change. If the launches of one side differ (another thread may free a storage a moment later), the metric is *unsteady*:
it has changed only if the ranges of the two sides are disjoint. *Rough* metrics are the process's memory as reported by
the system. Times are compared in pairs.

[Note: paired times]
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
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy import stats

from ..config.cell import CellConfig, work_id
from ..config.flat import base_name, differences, name_cells, show_value
from ..host.environment import SIMULATED
from ..host.files import read_yaml
from ..records import BETWEEN_STEPS, CATEGORIES, COLLECTIVES, LINKS, PHASE_PEAKS
from ..results.frames import Row, to_records
from ..results.provenance import torch_minor
from ..results.selection import latest
from ..results.summary import LEAST_LAUNCHES, NOT_SHAPE, TIMES, geometric_interval, summarize
from .lines import Lines, lines_by_cell

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
        change = measure_effect(metric, [a[metric] for a, _ in pairs], [b[metric] for _, b in pairs], threshold)
        changes.append(change if judged else replace(change, verdict=UNJUDGED))
    return changes


def same_runs(pairs: list[Pair]) -> bool:
    """Returns True if the sides are the same runs."""
    return all((a["run_id"], a["started"]) == (b["run_id"], b["started"]) for a, b in pairs)


def detectable(pairs: list[Pair]) -> float | None:
    """Returns the smallest effect that these pairs detect in 80 of 100 cases; None for fewer than three pairs."""
    spread = _spread(pairs)
    return None if spread is None else float(np.expm1(_reach(len(pairs)) * spread))


def pairs_needed(pairs: list[Pair], effect: float) -> int | None:
    """Returns the number of pairs with this spread that detect the effect in 80 of 100 cases; None above 1,000."""
    spread = _spread(pairs)
    if spread is None:
        return None
    return next((k for k in range(LEAST_LAUNCHES, 1001) if _reach(k) * spread <= np.log1p(effect)), None)


def _spread(pairs: list[Pair]) -> float | None:
    """Returns the standard deviation of the logarithms of the pairs' ratios of steps."""
    if len(pairs) < LEAST_LAUNCHES:
        return None
    return float(np.std([np.log(b["step_s"] / a["step_s"]) for a, b in pairs], ddof=1))


def _reach(pairs: int) -> float:
    """Returns the distance between 1 and the smallest detected effect, in standard deviations."""
    quantiles = stats.t.ppf([0.975, POWER], pairs - 1)
    return float(quantiles.sum() / np.sqrt(pairs))


def measure_effect(metric: str, a: list[float], b: list[float], threshold: float) -> Effect:
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


def noise_environment(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a run's row that determines which record applies to it."""
    return {
        "device_class": row["device_class"],
        "processor": row["processor"],
        "cores": int(row["cores"]),
        "torch": torch_minor(row["torch_version"]),
    }


def floor_from(launches: list[dict[str, Any]], config: CellConfig) -> NoiseFloor:
    """Returns the record of a cell's launches, all of them ok. Raises ValueError if there are too few."""
    if len(launches) < LEAST_LAUNCHES:
        raise ValueError(f"{base_name(config)} has {len(launches)} launches; a noise floor needs {LEAST_LAUNCHES}")
    medians = {metric: [float(row[metric]) for row in launches] for metric in TIMES}
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, len(launches) - 1) * np.sqrt(2)  # of a pair, in standard deviations
    last = launches[-1]
    return NoiseFloor(
        environment=noise_environment(last),
        cell=base_name(config),
        date=last["started"][:10],
        command=last["command"],
        commit=last["commit"],
        floors={metric: float(np.expm1(reach * np.std(np.log(t), ddof=1))) for metric, t in medians.items()},
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


WORK = ("model.", "huggingface.", "data.name", "data.vocabulary", "world_size", "batch", "sequence", "precision.name")
"""Keys, or prefixes of keys, that determine the training, in addition to `device_class` and `device`."""

CHOICES = tuple(f"model.{name}" for name in NOT_SHAPE if name != "kind")
"""Keys with these prefixes that change only the name or the method of the training."""

DEVICE = ("device", "device_class")
LOSS_CONDITIONS = ("data.text_hash", "seed", "draw_on", "deterministic", "measure.steps", "measure.warmup")
TIME_CONDITIONS = ("processor", "cores", "threads", "backend", "nodes", "deterministic")
ORIGIN = ("source_hash", "commit", "torch_version", "device_class", "processor", "cores")
"""Columns of a run, in addition to its config, on the origin of its figures."""

EXACT = (
    "psi", "peak_bytes", "growth_bytes", "states_bytes", *(f"max_{name}_bytes" for name in CATEGORIES),
    *BETWEEN_STEPS, *PHASE_PEAKS, "host_peak_bytes", "nvme_bytes", *(f"{link}_bytes" for link in LINKS),
    "volume_psi", *(f"volume_{name}_psi" for name in COLLECTIVES), "payload_bytes", "wire_bytes", "within_nodes_bytes",
    "between_nodes_bytes", "control_bytes", "quantized_gather_share", "quantized_reduction_share",
)  # fmt: skip
SINCE = ("growth_bytes", *BETWEEN_STEPS, *PHASE_PEAKS)
"""Exact metrics that older tables lack; a missing value is then not a change."""

ROUGH = (
    "allocator_peak_bytes", "timed_allocator_peak_bytes", "resident_bytes", "allocated_bytes", "reserved_bytes",
    "outside_ledger_bytes", "kept_bytes", "pinned_bytes",
)  # fmt: skip
ROUGH_NOISE = 0.05
"""Relative change of a rough metric below which it is noise."""

LOSSES = ("loss_first", "loss_last")


@dataclass(frozen=True)
class Change:
    """A metric's value on both sides; None if a side does not have it."""

    metric: str
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        """B minus A."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def relative(self) -> float | None:
        """The difference relative to A."""
        return self.difference / self.a if self.difference is not None and self.a else None


@dataclass(frozen=True)
class Compared:
    """The comparison of a pair of cells. Parts that are not comparable are empty; the `refused` fields say why."""

    a: Measured
    b: Measured
    differs: tuple[str, ...]
    """Messages on the compared fields and the conditions."""
    refused: tuple[str, ...] = ()
    loss_refused: tuple[str, ...] = ()
    time_refused: tuple[str, ...] = ()
    moved: tuple[Change, ...] = ()
    equal: tuple[str, ...] = ()
    at_peak: tuple[Change, ...] = ()
    """The categories whose share of the peak has changed."""
    unsteady: tuple[str, ...] = ()
    """Messages on exact metrics that differ as much between launches of one side as between the sides."""
    rough: tuple[Change, ...] = ()
    losses: tuple[Change, ...] = ()
    pairs: tuple[Pair, ...] = ()
    effects: tuple[Effect, ...] = ()
    floors: tuple[NoiseFloor, ...] = ()

    @property
    def failed(self) -> dict[str, Row]:
        """The sides whose cell is not ok, with its row."""
        return {side: cell.row for side, cell in (("A", self.a), ("B", self.b)) if cell.row["status"] != "ok"}

    @property
    def worse(self) -> bool:
        """True if bytes or volumes have changed, the step is slower, only B failed, or the work differs."""
        slower = any(effect.metric == "step_s" and effect.verdict == "slower" for effect in self.effects)
        return bool(self.moved or self.refused or slower or list(self.failed) == ["B"])


@dataclass(frozen=True)
class Comparison:
    """Pairs of cells, and the cells that only one side has."""

    pairs: list[Compared] = field(default_factory=list)
    only_a: list[Measured] = field(default_factory=list)
    only_b: list[Measured] = field(default_factory=list)

    @property
    def worse(self) -> bool:
        """True if a pair is worse, or a cell has lost its counterpart, which a gate must not ignore."""
        return bool(self.only_a or self.only_b or any(pair.worse for pair in self.pairs))


@dataclass(frozen=True)
class Judge:
    """Rules for comparing times: the smallest relevant effect as a fraction, and all records of noise floors."""

    minimum_effect: float
    floors: list[NoiseFloor]


def compare_runs(
    a: pd.DataFrame, b: pd.DataFrame, judge: Judge, lines: tuple[pd.DataFrame, pd.DataFrame] | None = None
) -> Comparison:  # fmt: skip
    """Compares the cells of A with those of B. `lines`: the sides' tables of lines."""
    ours, theirs = measured(a, lines and lines[0]), measured(b, lines and lines[1])
    matched = match(ours, theirs)
    taken = {id(cell) for pair in matched for cell in pair}
    return Comparison(
        [compare_cells(*pair, judge) for pair in matched],
        [cell for cell in ours if id(cell) not in taken],
        [cell for cell in theirs if id(cell) not in taken],
    )


def compare_cells(a: Measured, b: Measured, judge: Judge) -> Compared:
    """Compares a pair of cells."""
    differing = differences(a.config, b.config) | {
        name: (a.row[name], b.row[name]) for name in ORIGIN if a.row[name] != b.row[name]
    }
    messages = {
        key: f"{key} is {show_value(ours)} in A and {show_value(theirs)} in B"
        for key, (ours, theirs) in differing.items()
    }
    refused = tuple(message for key, message in messages.items() if is_work(key))
    differs = tuple(message for key, message in messages.items() if not is_work(key))
    compared = Compared(a, b, differs, refused)
    if refused or compared.failed:
        return compared
    moved, equal, unsteady = _exact(EXACT, a, b)
    parts = tuple(f"peak_{name}_bytes" for name in CATEGORIES)
    time_refused = tuple(messages[key] for key in TIME_CONDITIONS if key in messages)
    time_refused += _sides(a, b, lambda row: pd.isna(row["step_s"]), "has no times")
    loss_refused = tuple(messages[key] for key in LOSS_CONDITIONS if key in messages)
    loss_refused += _sides(a, b, lambda row: row["backend"] == SIMULATED, "is simulated")
    pairs = pair_up(a.launches, b.launches)
    applicable = list[NoiseFloor]()
    if a.config.nodes == 1:  # a floor is of one machine; with another torch there is another
        environments = [noise_environment(row) for row in (a.row, b.row)]
        of_sides = (next((f for f in judge.floors if f.environment == own), None) for own in environments)
        applicable = list({id(floor): floor for floor in of_sides if floor is not None}.values())
    return replace(
        compared,
        loss_refused=loss_refused,
        time_refused=time_refused,
        moved=moved,
        equal=equal,
        at_peak=_exact(parts, a, b)[0],
        unsteady=unsteady,
        rough=tuple(change for name in ROUGH if (change := _change(name, a.row, b.row))),
        losses=tuple(change for name in LOSSES if (change := _change(name, a.row, b.row))),
        pairs=tuple(pairs),
        effects=tuple(effects(pairs, judge.minimum_effect, applicable)) if not time_refused else (),
        floors=tuple(applicable),
    )


def _sides(a: Measured, b: Measured, is_so: Callable[[Any], bool], predicate: str) -> tuple[str, ...]:
    """Returns, for example, "A has no times" for each side whose row satisfies `is_so`."""
    return tuple(f"{name} {predicate}" for name, side in (("A", a), ("B", b)) if is_so(side.row))


def is_work(key: str) -> bool:
    """Returns True if cells that differ in this field train different things."""
    return key in DEVICE or (key.startswith(WORK) and key not in CHOICES)


def _change(metric: str, a: Row, b: Row) -> Change | None:
    """Returns the change of a metric; None if neither side has it."""
    return None if a[metric] is None and b[metric] is None else Change(metric, a[metric], b[metric])


def _exact(
    metrics: tuple[str, ...], a: Measured, b: Measured
) -> tuple[tuple[Change, ...], tuple[str, ...], tuple[str, ...]]:
    """Returns the changed metrics, the equal ones, and messages on the unsteady ones."""
    moved, equal, unsteady = [], [], []
    for metric in metrics:
        change = _change(metric, a.row, b.row)
        if change is None or (metric in SINCE and change.difference is None):
            continue
        ours, theirs = ({row[metric] for row in side.launches} - {None} for side in (a, b))
        if ours == theirs:
            equal.append(metric)
        elif change.difference is None or max(ours) < min(theirs) or max(theirs) < min(ours):
            moved.append(change)
        else:
            unsteady.append(f"{metric} differs among launches of one side: {_range(ours)} in A, {_range(theirs)} in B")
    return tuple(moved), tuple(equal), tuple(unsteady)


def _range(values: set[Any]) -> str:
    return f"{min(values):,}" if len(values) == 1 else f"{min(values):,} to {max(values):,}"


@dataclass(frozen=True, eq=False)
class Measured:
    """A cell of one side: its launches, and their summary row."""

    name: str
    config: CellConfig
    row: Row
    launches: list[Row]
    lines: Lines = field(default_factory=dict)


def measured(runs: pd.DataFrame, lines: pd.DataFrame | None) -> list[Measured]:
    """Returns the cells of these runs, each with its newest launches; `lines`: the runs' table of lines."""
    newest = latest(runs)
    by_cell = {} if lines is None else lines_by_cell(lines, newest)
    launches: dict[str, list[Row]] = {}
    for row in to_records(newest):
        launches.setdefault(row["cell_id"], []).append(row)
    rows = to_records(summarize(runs))
    configs = [CellConfig.from_json(row["config"]) for row in rows]
    return [
        Measured(name, config, row, launches[row["cell_id"]], by_cell.get(row["cell_id"], {}))
        for name, config, row in zip(name_cells(configs), configs, rows, strict=True)
    ]


def match(a: list[Measured], b: list[Measured]) -> list[tuple[Measured, Measured]]:
    """Pairs equal cells first, then equal work, then equal names, if they are unique on their side.

    A single cell on each side is always a pair, because both were named explicitly.
    """
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    keys: list[Callable[[Measured], str]] = [
        lambda cell: cell.row["cell_id"],
        lambda cell: work_id(cell.config),
        lambda cell: base_name(cell.config),
    ]
    matched: dict[int, tuple[Measured, Measured]] = {}
    left_a, left_b = list(a), list(b)
    for key in keys:
        ours, theirs = _unique(left_a, key), _unique(left_b, key)
        for value in ours.keys() & theirs.keys():
            matched[id(ours[value])] = ours[value], theirs[value]
            left_a = [cell for cell in left_a if cell is not ours[value]]
            left_b = [cell for cell in left_b if cell is not theirs[value]]
    return [matched[id(cell)] for cell in a if id(cell) in matched]


def _unique(cells: list[Measured], key: Callable[[Measured], str]) -> dict[str, Measured]:
    counts = Counter(map(key, cells))
    return {key(cell): cell for cell in cells if counts[key(cell)] == 1}
