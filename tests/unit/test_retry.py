"""`launch.retry`: a launch that ended in a status that it names is run again, and its row is the last attempt's."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.cells import cell
from zerobench.config.cell import CellConfig
from zerobench.config.schema import Launch, Search
from zerobench.sweep import sweep as sweeps
from zerobench.sweep.search import combinations
from zerobench.sweep.sweep import Sweep


def ends(monkeypatch: pytest.MonkeyPatch, *statuses: str) -> list[str]:
    """Has attempts end so, one after the other; returns the list of those to come."""
    coming = list(statuses)

    def attempt(*_: Any) -> tuple[dict[str, Any], bool]:
        left = len(coming)
        return {"status": coming.pop(0), "reason": "because", "attempt": len(statuses) - left + 1}, False

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
    ],
)
def test_a_launch_is_run_again_at_most_that_often(monkeypatch, tmp_path, retry, retries, statuses, last, left) -> None:
    coming = ends(monkeypatch, *statuses)
    sweep = Sweep(MagicMock())
    one = cell(
        "zero2", 2, results_dir=str(tmp_path), fail_fast=True, launch=Launch(threads=1, retry=retry, retries=retries)
    )
    assert one.problems == ()
    sweep.run([one])
    assert [row["status"] for row in sweep.rows] == [last], "one row, the last attempt's"
    assert len(coming) == left
    assert sweep.failed_fast is (last != "ok"), "only the last attempt counts"
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
