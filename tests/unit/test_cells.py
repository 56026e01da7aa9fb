"""The identity of a cell: what changes it, what does not, and batches that cannot be divided."""

from typing import Any

import pytest

from tests.cells import cell
from zerobench.config import schema_training
from zerobench.config.identity import work_id
from zerobench.config.schema import Gpt, Launch, Measure

PLAIN = cell("zero2", 2)


@pytest.mark.parametrize(
    "more",
    [
        {"seed": 1},
        {"clip": 1.0},
        {"accumulation": 2},
        {"micro_batch": 2},
        {"optimizer": schema_training.AdamW(lr=0.5)},
        {"strategy": {"mode": "vendor"}},
        {"draw_on": "device"},
        {"deterministic": True},
        {"measure": Measure(steps=3, warmup=2)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_is_measured_makes_another_cell(more: dict[str, Any]) -> None:
    other = cell("zero2", 2, **more)
    assert not other.problems
    assert other.cell_id != PLAIN.cell_id
    assert work_id(other.config) != work_id(PLAIN.config)


@pytest.mark.parametrize(
    "more",
    [
        {"results_dir": "elsewhere"},
        {"rerun": True},
        {"measure": Measure(steps=2, warmup=2, repeats=3)},
        {"measure": Measure(steps=2, warmup=2, check_training="true")},
        {"launch": Launch(threads=1, check_memory=False)},
        {"draw_on": "cpu"},
        {"deterministic": False},
        {"batch": 8},
    ],
    ids=lambda more: next(iter(more)),
)
def test_where_it_goes_how_often_and_what_is_the_default_do_not(more: dict[str, Any]) -> None:
    other = cell("zero2", 2, **more)
    assert not other.problems
    assert other.cell_id == PLAIN.cell_id


def test_a_model_of_one_tile_is_the_model_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import cells

    monkeypatch.setitem(cells.MODELS, "tiny", Gpt(layers=3, hidden=48, heads=4, tiles=1))
    assert cell("zero2", 2).cell_id == PLAIN.cell_id
    monkeypatch.setitem(cells.MODELS, "tiny", Gpt(layers=3, hidden=48, heads=4, tiles=2))
    assert cell("zero2", 2).cell_id != PLAIN.cell_id


def test_threads_are_the_machines_and_no_other_work() -> None:
    other = PLAIN.changed(launch=Launch(threads=7))
    assert other.cell_id != PLAIN.cell_id
    assert work_id(other.config) == work_id(PLAIN.config)


def test_a_batch_is_divided_by_ranks_and_micro_batches() -> None:
    divided = cell("zero2", 2, batch=24, accumulation=3)
    assert not divided.problems
    assert divided.cell_id == cell("zero2", 2, micro_batch=4, accumulation=3).cell_id
    assert cell("zero2", 2, batch=7).problems == (
        "batch=7: world_size=2 must divide it: every rank must get as many samples",
    )
    (problem,) = cell("zero2", 2, batch=8, accumulation=3).problems
    assert problem.startswith("batch=8: world_size=2 times accumulation=3 must divide it")
