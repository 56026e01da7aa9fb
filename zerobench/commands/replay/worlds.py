"""The recorded steps of runs, arranged for one page.

stream   events of one rank of one run, in order: rows of the table `events`
panel    a strategy with its additions (an offload, a codec): a stream per recorded rank, and the run's row
world    the panels of one number of ranks N, all of them measured or all simulated

All panels of a page train the same thing: they agree in SETTING. A panel has the same key in every world.

With costs of a device, the events of a simulated world have the times that are predicted for that device.

For other numbers of ranks, cells are simulated on fake tensors. Each rank keeps its micro-batch, so the batch grows
with N and a rank does the same computation as at the measured N. One rank is simulated, the fullest.

All streams of a world have one clock, so that one cursor moves through all of them.

anchor    an event that every stream has exactly once: the beginning of a phase, or of a module's forward or backward
clock     0 to TICKS. Anchors are at the same tick in all streams; events between two anchors are spread evenly

A tick is not a time: the instrument slows the accounted pass down, and streams differ in length. The order within each
stream is kept, and events between the same two anchors are shown between the same two ticks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...config.cell import CellConfig
from ...host.environment import SIMULATED
from ...host.terminal import progress_bar
from ...predict.estimate import formulas_of
from ...records.long_rows import COMPUTE, ORDER
from ...results.frames import to_records
from ...results.selection import latest
from ...results.tables import Results
from ...simulation.costs import GpuCosts, costs_at
from ...simulation.execute import CPU, CUDA, Execution, Limits, execute_all
from ...simulation.timeline import lay_out
from ...sizes import show_samples
from ...strategies import find, predicts, spare_look
from ...strategies.spec import StrategySpec
from ...theory.closed_forms import Formula, from_json, to_json
from ...theory.strategy import StrategyTheory
from ..perfetto import streams_by_rank

TICKS = 10_000
MOST_ANCHORS = 400
"""If there are more, only those of the outer modules are kept."""

Key = tuple[str, str, str, int]
"""Kind, name, direction, and the number of identical events before it."""


def common_ticks(streams: Sequence[pd.DataFrame]) -> list[NDArray[np.int64]]:
    """Returns the ticks of each stream's events, in order."""
    anchors = [_anchors(stream) for stream in streams]
    keys = [key for key in anchors[0] if all(key in other for other in anchors)]
    if len(keys) > MOST_ANCHORS:
        depth = sorted(key[1].count(".") for key in keys)[MOST_ANCHORS]
        keys = [key for key in keys if key[0] == "phase" or key[1].count(".") < depth]
    common = _in_one_order({key: np.array([each[key] for each in anchors]) for key in keys})
    indices = [
        np.array([-1, *(each[key] for key in common), len(stream)])
        for each, stream in zip(anchors, streams, strict=True)
    ]
    begins = [int((stream["kind"] == "live").sum()) for stream in streams]
    for index, begin in zip(indices, begins, strict=True):
        index[0] = max(begin - 1, 0)
    widths = np.maximum(np.mean([np.diff(index) for index in indices], axis=0), 0.0)
    at = np.concatenate([[0.0], np.cumsum(widths)])
    at *= TICKS / max(at[-1], 1.0)
    return [
        np.rint(np.interp(np.arange(len(s)), index, at)).astype(np.int64)
        for s, index in zip(streams, indices, strict=True)
    ]


def phase_ticks(stream: pd.DataFrame, ticks: NDArray[np.int64]) -> list[tuple[str, int]]:
    """Returns the phases and the ticks at which they begin."""
    begins = stream.index[stream["kind"] == "phase"]
    return [(str(stream["name"].iloc[index]), int(ticks[index])) for index in begins]


def _anchors(stream: pd.DataFrame) -> dict[Key, int]:
    """Returns the indices of a stream's anchors."""
    seen: Counter[tuple[str, str, str]] = Counter()
    anchors: dict[Key, int] = {}
    for index, (kind, name, operator) in enumerate(
        zip(stream["kind"], stream["name"], stream["operator"], strict=True)
    ):
        if kind in ("phase", "module"):
            event = str(kind), str(name), str(operator or "")
            anchors[(*event, seen[event])] = index
            seen[event] += 1
    return anchors


def _in_one_order(shared: dict[Key, NDArray[np.int64]]) -> list[Key]:
    """Returns the longest sequence of anchors that is in the same order in all streams."""
    keys, indices = list(shared), list(shared.values())
    best, before = np.ones(len(keys), dtype=int), np.full(len(keys), -1)
    for here in range(len(keys)):
        for there in range(here):
            if best[there] >= best[here] and (indices[there] < indices[here]).all():
                best[here], before[here] = best[there] + 1, there
    chain, at = [], int(best.argmax()) if keys else -1
    while at >= 0:
        chain.append(keys[at])
        at = int(before[at])
    return chain[::-1]


MEASURED, EXECUTED = "measured", "simulated"

SETTING = ("model", "device", "precision", "optimizer", "micro_batch", "accumulation", "sequence", "checkpointing")
"""Columns of the table of runs in which all panels of a page agree."""

MOST_PANELS = 8


@dataclass(frozen=True)
class Panel:
    """One strategy at one N. `row`: its row of the table of runs, or the columns of one that a simulation has.
    `streams`: rank -> its events. `problem`: why there are none.
    """

    key: str
    strategy: str
    row: dict[str, Any]
    streams: dict[int, pd.DataFrame]
    problem: str = ""

    @property
    def config(self) -> CellConfig:
        """The resolved cell."""
        return CellConfig.from_json(self.row["config"])

    @property
    def spec(self) -> StrategySpec | None:
        """The strategy's row in the table of strategies; None for one that only a user's script knows."""
        return find(self.strategy)

    @property
    def label(self) -> str:
        """Its display name."""
        name = self.strategy if self.spec is None else self.spec.label
        return f"{name} {self.row.get('systems') or ''}".strip()

    @property
    def color(self) -> str:
        """Its color, as in figures."""
        return (spare_look(0) if self.spec is None else self.spec.look).color

    @property
    def theory(self) -> StrategyTheory | None:
        """The theory of the strategy, or of the stage that partitions the same states."""
        if self.spec is None:
            return None
        stage = self.spec if self.spec.theory or not self.spec.partitions_as else find(self.spec.partitions_as)
        return stage.theory if stage is not None else None

    @property
    def formulas(self) -> dict[str, Formula]:
        """Category -> the closed form of its bytes; empty if theory has none."""
        return from_json(self.row.get("formulas"))


@dataclass(frozen=True)
class ReplayWorld:
    """Panels at one number of ranks. `how`: MEASURED or EXECUTED."""

    ranks: int
    how: str
    panels: tuple[Panel, ...]


def recorded_worlds(results: Results) -> list[ReplayWorld]:
    """Returns the worlds of finished runs that recorded their events, by N and MEASURED before EXECUTED.

    Raises ValueError if there are none, or if they do not train the same thing.
    """
    runs = results.runs[results.runs["run_id"].isin(results.events["run_id"]) & (results.runs["status"] == "ok")]
    if runs.empty:
        finished = results.runs.loc[results.runs["status"] == "ok", "command"].tolist()
        given = finished[-1] if finished else "zerobench -m strategy=ddp,zero1,zero2,zero3 world_size=2"
        raise ValueError(f"no finished run has a table of events; record one with: {given} measure.events=true")
    runs = latest(runs).drop_duplicates("cell_id", keep="last")
    for column in SETTING:
        values = runs[column].astype("object").where(runs[column].notna(), None).unique().tolist()
        if len(values) > 1:
            every = " and ".join(map(str, values))
            raise ValueError(f"runs differ in {column}, which is {every}; choose one with --where {column}={values[0]}")
    worlds = []
    of = runs["world_size"], runs["backend"] == SIMULATED
    for (ranks, simulated), group in runs.groupby([*of], sort=True):
        panels = _panels(group, results.events)
        worlds.append(ReplayWorld(int(str(ranks)), EXECUTED if simulated else MEASURED, panels))
    return worlds


def with_ranks(world: ReplayWorld, ranks: Sequence[int] | None) -> ReplayWorld:
    """Returns a measured world with only `ranks` of its ranks; None: all. Raises ValueError for a missing one."""
    if ranks is None or world.how != MEASURED:
        return world
    kept = []
    for panel in world.panels:
        if absent := [rank for rank in ranks if rank not in panel.streams]:
            there = ", ".join(map(str, panel.streams))
            raise ValueError(f"--ranks {absent[0]}: {panel.label} at N={world.ranks} has recorded ranks {there}")
        kept.append(replace(panel, streams={rank: panel.streams[rank] for rank in ranks}))
    return replace(world, panels=tuple(kept))


def _panels(runs: pd.DataFrame, events: pd.DataFrame) -> tuple[Panel, ...]:
    rows = to_records(runs)
    rows.sort(key=lambda row: (str(row["strategy"]), str(row.get("systems") or "")))
    if len(rows) > MOST_PANELS:
        raise ValueError(
            f"{len(rows)} cells at N={rows[0]['world_size']}; a page shows {MOST_PANELS}: choose with --where"
        )
    panels = [
        Panel(
            f"{row['strategy']} {row.get('systems') or ''}".strip(), row["strategy"], row,
            streams_by_rank(events[events["run_id"] == row["run_id"]]),
        )
        for row in rows
    ]  # fmt: skip
    keys = [panel.key for panel in panels]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"several cells of {twice[0]} at N={rows[0]['world_size']}; choose one with --where KEY=VALUE")
    return tuple(panels)


def setting_words(panels: Sequence[Panel]) -> str:
    """Formats the setting of a page."""
    row = panels[0].row
    psi = f"ψ = {row['psi']:,} parameters, " if row.get("psi") else ""
    batch = f"{show_samples(row['micro_batch'], row['sequence'])} per rank and micro-batch"
    return f"{row['model']}, {psi}{row['optimizer']}, {row['precision']}, {batch}, {row['device']}"


LIMITS = Limits(seconds=300.0)


def executed_worlds(
    panels: Sequence[Panel], ranks: Sequence[int], jobs: int | None, costs: GpuCosts | None = None
) -> list[ReplayWorld]:
    """Returns a world for each N of `ranks`: the cells of `panels`, simulated at N. `costs`: of the device for which
    their events are laid out in time; None: events have the times of their simulation.
    """
    target = CPU if costs is None else CUDA
    wanted = [(n, panel) for n in ranks for panel in panels]
    configs = [at(panel.config, n) for n, panel in wanted]
    with progress_bar("executing", len(configs), "cells") as advance:

        def tell(number: int, news: object) -> None:
            if isinstance(news, Execution):
                n, panel = wanted[number]
                advance(name=f"{panel.label}, N = {n}")

        done = execute_all(configs, target, jobs, tell, LIMITS, costs is not None)
    made = {n: [] for n in ranks}  # type: dict[int, list[Panel]]
    for (n, panel), execution in zip(wanted, done, strict=True):
        made[n].append(_executed_panel(panel, execution, costs))
    return [ReplayWorld(n, EXECUTED, tuple(world_panels)) for n, world_panels in made.items()]


def at(config: CellConfig, ranks: int) -> CellConfig:
    """Returns the cell on `ranks` ranks, each with the same micro-batch."""
    measure = replace(config.measure, events=True)
    batch = config.micro_batch * config.accumulation * (ranks // config.tensor_parallel)
    return replace(config, world_size=ranks, batch=batch, rank=None, measure=measure)


def _executed_panel(panel: Panel, execution: Execution, costs: GpuCosts | None) -> Panel:
    if execution.record is None:
        return replace(panel, row=panel.row | dict.fromkeys(COLUMN_NUMBERS), streams={}, problem=execution.problem)
    config = execution.config
    has_theory = predicts(config.strategy.values())
    row = panel.row | {
        "run_id": "", "command": "", "world_size": config.world_size, "config": json.dumps(config.as_dict()),
        "peak_bytes": execution.peak_bytes, "states_bytes": execution.states_bytes, "wire_bytes": execution.wire_bytes,
        "volume_psi": execution.volume_elements / panel.row["psi"] if panel.row.get("psi") else None,
        "formulas": to_json(formulas_of(config, execution.record.schedule)) if has_theory else None,
    }  # fmt: skip
    events = list(execution.record.events)
    if costs is not None:  # at their predicted times, without kinds that a recorded step does not have
        placed = zip(events, lay_out(events, costs_at(costs, config.world_size)).at, strict=True)
        events = [replace(event, seconds=at) for event, at in placed if event.kind not in (COMPUTE, ORDER)]
    return replace(panel, row=row, streams=streams_by_rank(pd.DataFrame([asdict(event) for event in events])))


COLUMN_NUMBERS = ("peak_bytes", "states_bytes", "wire_bytes", "volume_psi", "formulas", "run_id", "command")
"""Columns of a run's row that a simulation replaces."""
