"""`zerobench.run`: what it refuses, and how its arguments become a command line. The notebook's test runs a sweep."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import pytest

import zerobench
from zerobench.config.cell import Cell
from zerobench.registry import MODELS
from zerobench.sweep import from_python
from zerobench.sweep.cell import run_cell


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Command lines that would have run; no fork server starts."""
    seen: list[Any] = []
    monkeypatch.setattr(from_python.fork_server, "start", lambda: None)
    real = from_python.compose_cells
    monkeypatch.setattr(from_python, "compose_cells", lambda words: (seen.append(list(sys.argv)), real(words))[1])
    monkeypatch.setattr(from_python, "run_cells", lambda cells, tables: (seen.append(len(cells)), (130, []))[1])
    return seen


@pytest.mark.slow
def test_lists_are_sweeps_and_a_run_records_the_same_command(composed: list[Any]) -> None:
    before = list(sys.argv)
    with pytest.raises(KeyboardInterrupt):
        zerobench.run("measure.steps=3", strategy=["ddp", "zero1"], model="gpt_tiny", clip=None, world_size=(1, 2))
    words = "zerobench -m measure.steps=3 strategy=ddp,zero1 model=gpt_tiny clip=null world_size=1,2"
    assert composed == [words.split(), 4]
    assert sys.argv == before


@pytest.mark.slow
def test_a_refused_cell_is_a_row_without_a_run(composed: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def run_cells(cells: list[Cell], tables: bool) -> tuple[int, list[dict[str, Any]]]:
        return 1, [asdict(run_cell(cell, lambda _: None)) for cell in cells if cell.problems]

    monkeypatch.setattr(from_python, "run_cells", run_cells)
    where = str(tmp_path / "runs")
    runs = zerobench.run("batch=4", strategy="ddp", model="gpt_tiny", world_size=[2, 3], results_dir=where).runs
    assert runs[["world_size", "status", "run_id"]].to_dict("records") == [
        {"world_size": 3, "status": "invalid", "run_id": ""}
    ]
    assert not list(tmp_path.iterdir())


def test_what_is_no_choice_is_a_sentence(composed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for choices, keys, sentence in (
        ((), {"strateg": "ddp"}, "strateg: no such key; did you mean strategy"),
        (("--dry-run",), {}, "--dry-run is a flag of the command line; write choices as KEY=VALUE"),
        (("status",), {}, "status: "),
    ):
        with pytest.raises(ValueError, match=sentence):
            zerobench.run(*choices, **keys)
    monkeypatch.setattr(from_python.multiprocessing, "parent_process", lambda: object())
    with pytest.raises(RuntimeError, match='below `if __name__ == "__main__":`'):
        zerobench.run(strategy="ddp")
    assert all(not isinstance(one, int) for one in composed), "nothing ran"


@pytest.mark.slow
def test_a_notebooks_own_model_is_refused_for_ranks_cannot_import_it(composed: list[Any], monkeypatch) -> None:
    monkeypatch.setitem(MODELS.builders, "bigram", lambda width=4: None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "mine.py", raising=False)
    with pytest.raises(KeyboardInterrupt):  # in a script it would have run
        zerobench.run(strategy="ddp", model="bigram", world_size=2)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None)
    with pytest.raises(ValueError, match="model=bigram is registered in this notebook, which ranks cannot import"):
        zerobench.run(strategy="ddp", model="bigram", world_size=2)
