"""Plain technical English: how docstrings open, no persons among the tensors, and torch's spelling.

Every finding is a line `file:line: word: text`, so that a failure reads as a list of what to mend.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zerobench import initialize

ROOT = Path(__file__).resolve().parents[2]

DONE = ("zerobench/", "analysis/", "tools/docs/", "examples/")
"""Folders whose sentences are held to the rules; the tests' own are not yet."""

OPENERS = re.compile(r"(The same\b|What\b|Whatever\b|Whether\b|Who\b|Whose\b|See above\b|See `|See \[)")
"""Openings that neither say what a thing does nor what it is: write "Returns ...", "True where ...", or the noun."""

PERSONS = re.compile(r"\b(who|whoever|whom|nobody|anybody|somebody|everybody|himself)\b", re.IGNORECASE)
"""Tensors, ranks and processes are none of these."""

OF_PEOPLE: dict[str, str] = {}
"""A line's text -> why it does speak of people."""

BRITISH = re.compile(
    r"(?<![a-z])[a-z_]*?("
    r"(synchron|material|quant|initial|optim|normal|serial|recogn|organ|util|minim|maxim|summar|parallel|vector|random"
    r"|special|general|categor|standard|custom|final|prior|visual|discret|capital|orthogonal|util)is(e[drs]?|ing|ation|able)s?"
    r"|behaviour|colour|favour|flavour|honour|neighbour|grey|(label|cancel|model|travel|signal|level|total)l(ed|ing)"
    r"|catalogue|centre|licence|judgement|acknowledgement|analyse[ds]?|whilst|learnt"
    r")(?![a-z])",
    re.IGNORECASE,
)

BRITISH_ON_PURPOSE = {
    "zerobench/zero/modules/meta_init.py": 'getattr(model, "initialisers", None)',
    "zerobench/dispatch/slurm.py": "CANCELLED",
    "tests/unit/test_slurm.py": "CANCELLED",
    "tests/cluster/test_slurm_sweep.py": "CANCELLED",
    "tests/unit/test_language.py": "",
}
"""File -> what stands in a line that may be so: models of users have a method of that name; SLURM's word; this list."""


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    found = [f"{_place(path)}:{line}: {text}" for path in _checked() for line, text in openings(path.read_text())]
    assert not found, "\n".join(found)


def test_only_people_are_persons() -> None:
    found = [f"{_place(path)}:{line}: {text}" for path in _checked() for line, text in persons(path.read_text())]
    assert not found, "\n".join(found)


def test_spelling_is_that_of_torch() -> None:
    found = [
        f"{_place(path)}:{line}: {text}"
        for path in _tracked()
        for line, text in british(path.read_text())
        if BRITISH_ON_PURPOSE.get(_place(path), "no line") not in text
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("opening", ["The same.", "What it is.", "Whether it is so.", "See above.", "Who asks."])
def test_a_planted_opening_is_seen(opening: str) -> None:
    """In a function's docstring, and in the one below a constant."""
    assert openings(f'def f():\n    """{opening}"""\n') == [(2, opening)]
    assert openings(f'A = 1\n"""{opening}"""\n') == [(2, opening)]
    assert not openings('def f():\n    """Returns what it is."""\n')


def test_planted_persons_and_spellings_are_seen() -> None:
    assert [line for line, _ in persons('x = 1  # nobody waits\ny = "for whoever reads"\nwhole = 2\n')] == [1, 2]
    assert [line for line, _ in british("colour = 1\ncolor = 2\ndef is_synchronising(): ...\nnoise = 3\n")] == [1, 3]
    assert not british("advised, exercise, otherwise, promised, finalists, initials, called, filled, optimistic")


def test_the_british_name_of_a_models_initializers_is_still_read() -> None:
    """A model written for an older release, built on meta, gets the values that its own steps give it."""

    class Model(nn.Linear):
        def initialisers(self) -> Iterator[tuple[nn.Module, Callable[[nn.Module], Any]]]:
            yield self, lambda module: nn.init.constant_(module.weight, 3.0)

    with torch.device("meta"):
        model = Model(2, 2)
    engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero1")
    assert (engine.full_state_dict()["weight"] == 3.0).all()


def openings(source: str) -> list[tuple[int, str]]:
    """Docstrings, those of constants and fields too, that open as OPENERS says: line and first line."""
    strings = (
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return sorted((one.lineno, one.value.splitlines()[0]) for one in strings if OPENERS.match(one.value))


def persons(source: str) -> list[tuple[int, str]]:
    """Lines with a word of PERSONS: in docstrings, comments and messages alike, since no identifier has one."""
    return [(number, line) for number, line in _lines(source) if PERSONS.search(line) and line not in OF_PEOPLE]


def british(source: str) -> list[tuple[int, str]]:
    """Lines with a word of BRITISH, identifiers included."""
    return [(number, line) for number, line in _lines(source) if BRITISH.search(line)]


def _lines(source: str) -> Iterator[tuple[int, str]]:
    return ((number, line.strip()) for number, line in enumerate(source.splitlines(), 1))


def _checked() -> list[Path]:
    return [path for path in _tracked() if path.suffix == ".py" and _place(path).startswith(DONE)]


def _tracked() -> list[Path]:
    """Files that people write: the code, tests, configuration and documents, those of a wheel or a checkout alike."""
    kinds = ("*.py", "*.yaml", "*.md", "*.toml", "*.cpp", "Makefile")
    listed = subprocess.run(["git", "ls-files", *kinds], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    skipped = ("results/", "CHANGELOG.md")
    return [ROOT / name for name in listed.splitlines() if not name.startswith(skipped) and (ROOT / name).exists()]


def _place(path: Path) -> str:
    return str(path.relative_to(ROOT))
