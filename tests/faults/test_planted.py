"""Mistakes are planted one at a time: each must be seen, and its category or collective named.

Seen by a sentence of `unexplained`, which needs nothing to compare with, or by the budget of an honest run. What is
wrong with the training itself (a rank's gradients lost, gradients doubled) is not memory's or traffic's to see.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.cells import cell
from tests.faults.planted import FAULTS, Fault, run_planted
from zerobench.config import schema_memory
from zerobench.config.cell import Cell, CellConfig
from zerobench.config.schema_training import Bf16
from zerobench.judging.judge import Limit, judge_cell, recorded
from zerobench.launch.start_ranks import launch
from zerobench.sweep import aggregate
from zerobench.sweep.cell import _blank_row
from zerobench.worker import RankJob

NAMED = {
    "bf16": Bf16(),
    "cpu": schema_memory.CpuOffload(),
    "cpu_delayed": schema_memory.CpuOffload(delayed=True, delayed_after=3),
    "nvme": schema_memory.NvmeOffloadConfig(block_bytes=64 * 1024, buffers=8, depth=2),
}


def cell_of(fault: Fault) -> Cell:
    more = {key: NAMED[value] for key, value in fault.config.items()}
    one = cell(fault.strategy, 2, backend="simulated", **more)
    assert not one.problems, one.problems
    return one


def setting(fault: Fault) -> tuple[str, ...]:
    return (fault.strategy, *fault.config.values())


@cache
def records(folder: Path) -> dict[tuple[str, ...] | str, Any]:
    """Of every fault by its name, and of an honest run by its setting; one process for all."""
    honest = {setting(fault): cell_of(fault) for fault in FAULTS}
    jobs: dict[tuple[str, ...] | str, Cell] = {**honest, **{fault.name: cell_of(fault) for fault in FAULTS}}
    planted = [
        (key if isinstance(key, str) else None, RankJob(one.config, "accounted", 0, str(folder / "meet"), str(folder)))
        for key, one in jobs.items()
    ]
    outcome = launch(run_planted, [planted], folder / "logs", 300)
    assert outcome.status == "ok", (folder / "logs/rank0.log").read_text()[-3000:]
    (found,) = outcome.results
    rows = {}
    for (key, one), record in zip(jobs.items(), found, strict=True):
        rows[key] = row = _blank_row(one)
        row.status = "ok"
        aggregate.join(row, one.config, [record])
    return rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...] | str, Any]:
    return records(tmp_path_factory.mktemp("planted"))


def said_of(row: Any, honest: Any, config: CellConfig) -> tuple[list[str], list[str]]:
    """Returns the row's own sentences, and those of the budget of an honest run."""
    limits = {name: Limit(value) for name in recorded(config) if (value := getattr(honest, name)) is not None}
    found = judge_cell("cell", limits, vars(row))
    return [one for one in row.unexplained.split("; ") if one], [one.sentence for one in found]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_mistake_is_seen_and_named(rows: dict[Any, Any], fault: Fault) -> None:
    row, honest = rows[fault.name], rows[setting(fault)]
    alone, held = said_of(row, honest, cell_of(fault).config)
    assert any(word in sentence for word in fault.named for sentence in [*alone, *held]), (alone, held)


def test_an_honest_run_has_nothing_unexplained(rows: dict[Any, Any]) -> None:
    for fault in FAULTS:
        assert rows[setting(fault)].unexplained == "", setting(fault)
