"""`zerobench.run`: what it refuses, and how its arguments become a command line. The notebook's test runs a sweep."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import zerobench
from zerobench.registry import MODELS
from zerobench.sweep import from_python


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Command lines that would have run; no fork server starts."""
    seen: list[Any] = []
    monkeypatch.setattr(from_python.fork_server, "start", lambda: None)
    real = from_python.compose_cells
    monkeypatch.setattr(from_python, "compose_cells", lambda words: (seen.append(list(sys.argv)), real(words))[1])
    monkeypatch.setattr(from_python, "run_cells", lambda cells, tables: (seen.append(len(cells)), (130, []))[1])
    return seen


def test_lists_are_sweeps_and_a_run_records_the_same_command(composed: list[Any]) -> None:
    before = list(sys.argv)
    with pytest.raises(KeyboardInterrupt):
        zerobench.run("measure.steps=3", strategy=["ddp", "zero1"], model="gpt_tiny", clip=None, world_size=(1, 2))
    words = "zerobench -m measure.steps=3 strategy=ddp,zero1 model=gpt_tiny clip=null world_size=1,2"
    assert composed == [words.split(), 4]
    assert sys.argv == before


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


def test_a_notebooks_own_model_is_refused_for_ranks_cannot_import_it(
    composed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS.builders, "bigram", lambda width=4: None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "mine.py", raising=False)
    with pytest.raises(KeyboardInterrupt):  # in a script it would have run
        zerobench.run(strategy="ddp", model="bigram", world_size=2)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None)
    with pytest.raises(ValueError, match="model=bigram is registered in this notebook, which ranks cannot import"):
        zerobench.run(strategy="ddp", model="bigram", world_size=2)
