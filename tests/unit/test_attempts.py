"""Attempts at a cell are in their order, whatever the wall clock said; `launch.retry` makes others, the last counts."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.cells import cell, sound
from zerobench.config.cell import Cell, CellConfig
from zerobench.config.schema import Launch, Search
from zerobench.records import LineRow
from zerobench.results.folders import claim_folder, write_run
from zerobench.sweep import cell as cells
from zerobench.sweep import sweep as sweeps
from zerobench.sweep.search import combinations
from zerobench.sweep.sweep import Sweep


def attempt(one: Cell, hour: int, **more: object) -> str:
    """An attempt that began at an hour of a day, by the clock; its run_id."""
    row = replace(cells.new_row(one), status="ok", started=f"2026-01-01T{hour:02}:00:00.000+00:00", **more)
    where, prefix = Path(one.config.results_dir), cells.run_prefix(one)
    tables = {"lines": [LineRow(0, "peak", "activations", "mlp", "model.py:7 in forward", 4096, 1)]}
    return write_run(claim_folder(where, prefix), prefix, row, one.config, {}, tables).name


def test_a_value_that_is_not_finite_is_null_in_the_file(tmp_path: Path) -> None:
    """JSON has no NaN, and other readers than Python's refuse it."""
    one = cell("zero1", 2, results_dir=str(tmp_path))
    made = tmp_path / attempt(one, 5, loss_first=math.nan, loss_last=-math.inf, step_s=0.5)
    text = (made / "run.json").read_text()
    assert not any(word in text for word in ("NaN", "Infinity"))
    assert [json.loads(text)[name] for name in ("loss_first", "loss_last", "step_s")] == [None, None, 0.5]


def ends(monkeypatch: pytest.MonkeyPatch, *statuses: str) -> list[str]:
    """Has attempts end so, one after the other; returns the list of those to come."""
    coming = list(statuses)

    def attempt(*_: Any) -> tuple[Any, bool]:
        row: Any = SimpleNamespace(status=coming.pop(0), reason="because")
        if row.status == "interrupted":
            raise cells.StoppedError(row)
        return row, False

    monkeypatch.setattr(sweeps, "find_or_run", attempt)
    return coming


@pytest.mark.parametrize(
    ("retry", "retries", "statuses", "last", "left"),
    [
        (["crash"], 1, ["crash", "ok"], "ok", 0),
        (["crash", "timeout"], 3, ["crash", "timeout", "crash", "ok"], "ok", 0),
        (["crash"], 1, ["crash", "crash", "ok"], "crash", 1),
        (["timeout"], 5, ["crash", "ok"], "crash", 1),
        ([], 5, ["crash", "ok"], "crash", 1),
        (["oom"], 1, ["oom", "diverged", "ok"], "diverged", 1),
        (["crash"], 1, ["crash", "interrupted", "ok"], "interrupted", 1),
    ],
)
def test_a_launch_is_run_again_at_most_that_often(monkeypatch, tmp_path, retry, retries, statuses, last, left) -> None:
    coming = ends(monkeypatch, *statuses)
    sweep = Sweep(MagicMock())
    launch = Launch(threads=1, retry=retry, retries=retries)
    sweep.run([sound("zero2", 2, results_dir=str(tmp_path), fail_fast=True, launch=launch)])
    assert [row.status for row in sweep.rows] == [last], "one row, the last attempt's"
    assert len(coming) == left
    assert sweep.failed_fast is (last not in ("ok", "interrupted")), "only the last attempt counts, and not the user's"
    assert sweep.reporter.again.call_count == len(statuses) - left - 1


def test_what_may_be_retried_and_where_it_is_kept(tmp_path: Path) -> None:
    again = cell("zero2", 2, launch=Launch(threads=1, retry=["crash"], retries=2))
    assert again.cell_id == cell("zero2", 2).cell_id, "it changes nothing that is measured"
    written = CellConfig.from_dict(again.config.as_dict())
    assert (written.launch.retry, written.launch.retries) == (("crash",), 2), "a sweep's cells pass through this form"
    assert "retry" not in cell("zero2", 2).config.as_dict()
    wrong = cell("zero2", 2, launch=Launch(threads=1, retry=["crash", "divergd"], retries=0))
    assert wrong.problems == (
        "launch.retry=divergd: use crash, timeout, oom; other ends would be the same again",
        "launch.retries=0: must be at least 1",
    )


def test_a_search_takes_a_full_memory_for_an_answer() -> None:
    search = cell("zero2", 2, batch=4, search=Search("96 MiB"), launch=Launch(threads=1, retry=["oom", "crash"]))
    assert {one.config.launch.retry for ladder in combinations(search) for one in ladder} == {("crash",)}
