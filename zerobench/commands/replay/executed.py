"""A page's cells at other numbers of ranks, executed on fake tensors: what a rank would hold and send.

Each rank keeps its micro-batch, so that the batch grows with N and a rank computes what it computed at the measured N.
One rank is executed, the fullest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...config.cell import CellConfig
from ...fake_execution import Execution, Limits, execute_all
from ...predict.estimate import formulas_of
from ...rank_record import RankRecord
from ...strategies import predicts
from ...theory.closed_forms import to_json
from .worlds import EXECUTED, Panel, World, streams_of

LIMITS = Limits(seconds=300.0)


def executed_worlds(panels: Sequence[Panel], ranks: Sequence[int], jobs: int | None) -> list[World]:
    """Returns a world for each N of `ranks`: the cells of `panels`, executed there."""
    wanted = [(n, panel) for n in ranks for panel in panels]
    configs = [at(panel.config, n) for n, panel in wanted]
    with _progress(len(configs)) as tell:
        done = execute_all(configs, jobs=jobs, tell=tell, limits=LIMITS)
    made = {n: [] for n in ranks}  # type: dict[int, list[Panel]]
    for (n, panel), one in zip(wanted, done, strict=True):
        made[n].append(_panel(panel, one))
    return [World(n, EXECUTED, tuple(found)) for n, found in made.items()]


def at(config: CellConfig, ranks: int) -> CellConfig:
    """Returns the cell on `ranks` ranks, each with its micro-batch."""
    measure = replace(config.measure, events=True)
    batch = config.micro_batch * config.accumulation * ranks
    return replace(config, world_size=ranks, batch=batch, rank=None, measure=measure)


def _panel(panel: Panel, one: Execution) -> Panel:
    if one.record is None:
        return replace(panel, row=panel.row | dict.fromkeys(NUMBERS), streams={}, problem=one.problem)
    row = panel.row | {
        "run_id": "", "command": "", "world_size": one.config.world_size, "config": json.dumps(one.config.as_dict()),
        "peak_bytes": one.peak_bytes, "states_bytes": one.states_bytes, "wire_bytes": one.wire_bytes,
        "volume_psi": one.volume_elements / panel.row["psi"] if panel.row.get("psi") else None,
        "formulas": _formulas(one.config, one.record),
    }  # fmt: skip
    return replace(panel, row=row, streams=streams_of(pd.DataFrame([asdict(event) for event in one.record.events])))


def _formulas(config: CellConfig, record: RankRecord) -> str | None:
    """Returns the closed forms of a cell as a run's row has them; None where theory has none."""
    if not predicts(config.strategy.values()):
        return None
    return to_json(formulas_of(config, record.schedule))


NUMBERS = ("peak_bytes", "states_bytes", "wire_bytes", "volume_psi", "formulas", "run_id", "command")
"""Columns of a run's row that an execution has anew."""


@contextmanager
def _progress(cells: int) -> Iterator[Any]:
    """Shows how many of the cells are executed."""
    columns = (TextColumn("executing"), BarColumn(), MofNCompleteColumn(), TextColumn("cells"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=cells)
        yield lambda number, news: progress.advance(task) if isinstance(news, Execution) else None
