"""Compares two *sides*, A and B: sets of runs, in which the newest launches of each cell count.

A *pair of cells* consists of one cell of each side. Its fields are of three kinds. *Work* fields determine the
training: if they differ, nothing is comparable. *Condition* fields affect one kind of metric: the number of cores
affects times, the seed affects losses. All others, such as the strategy or the source, are the subject of the
comparison.

*Exact* metrics are bytes and volumes, which launches of identical code repeat to the byte, so any difference is a
change. If the launches of one side differ (another thread may free a storage a moment later), the metric is *unsteady*:
it has changed only if the ranges of the two sides are disjoint. *Rough* metrics are the process's memory as reported by
the system. Times: judging/paired.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from ..config.cell import CellConfig, work_id
from ..config.flat import base_name, differences, name_cells, show_value
from ..host.environment import SIMULATED
from ..records import BETWEEN_STEPS, CATEGORIES, COLLECTIVES, LINKS, PHASE_PEAKS
from ..results.frames import records_of
from ..results.selection import latest
from ..results.summary import summarize
from .lines import Lines, lines_by_cell
from .paired import Effect, NoiseFloor, Pair, effects, environment_of, lookup, pair_up

WORK = ("model.", "huggingface.", "data.name", "data.vocabulary", "world_size", "batch", "sequence", "precision.name")
"""Keys, or prefixes of keys, that determine the training, in addition to `device_class` and `device`."""

CHOICES = ("model.name", "model.checkpointing")
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


def compare_runs(
    a: pd.DataFrame, b: pd.DataFrame, minimum_effect: float, floors: list[NoiseFloor],
    lines: tuple[pd.DataFrame, pd.DataFrame] | None = None,
) -> Comparison:  # fmt: skip
    """Compares the cells of A with those of B. `floors`: all available records; `lines`: the sides' tables of lines."""
    ours, theirs = measured(a, lines and lines[0]), measured(b, lines and lines[1])
    matched = match(ours, theirs)
    taken = {id(cell) for pair in matched for cell in pair}
    return Comparison(
        [compare_cells(*pair, minimum_effect, floors) for pair in matched],
        [cell for cell in ours if id(cell) not in taken],
        [cell for cell in theirs if id(cell) not in taken],
    )


def compare_cells(a: Measured, b: Measured, minimum_effect: float, floors: list[NoiseFloor]) -> Compared:
    """Compares a pair of cells. `minimum_effect`: smallest relevant change of a time; `floors`: all records."""
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
        of_sides = (lookup(floors, environment_of(row)) for row in (a.row, b.row))
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
        effects=tuple(effects(pairs, minimum_effect, applicable)) if not time_refused else (),
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


Row = dict[str, Any]


@dataclass(frozen=True)
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
    for row in records_of(newest):
        launches.setdefault(row["cell_id"], []).append(row)
    rows = records_of(summarize(runs))
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
