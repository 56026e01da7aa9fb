"""The runner of planted faults tells those that tests catch from those that they do not, on a project of two files."""

from collections import Counter
from pathlib import Path

import pytest

from tests.mutations import run
from tests.mutations.__main__ import main
from tests.mutations.catalog import MUTANTS
from tests.mutations.mutant import Change, Mutant

SOURCE = "def double(x: int) -> int:\n    y = x + x\n    return y\n"
TESTS = """
import pytest
from adding import double

@pytest.mark.parametrize("x", [0, 1])
def test_double(x):
    assert double(x) == 2 * x

def test_nothing():
    assert double(0) == 0
"""
DOUBLE = "test_adding.py::test_double"


def planted(name: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, "", (Change("adding.py", "double", old, new),), tests, "package")


CASES = {
    "killed": (planted("killed", "x + x", "x", DOUBLE), "test_double[1]"),
    "survived": (planted("survived", "x + x", "x", DOUBLE, "test_adding.py::test_nothing"), "test_nothing passes"),
    "stale": (planted("stale", "x * 2", "x", DOUBLE), "no longer has 'x * 2'"),
    "twice": (planted("twice", "y", "z", DOUBLE), "adding.py double has 'y' 2 times"),
    "no Python": (planted("no Python", "x + x", "x +", DOUBLE), "is no Python"),
    "no import": (planted("no import", "return y", "return y\n1 / 0", DOUBLE), "cannot be imported"),
    "no test": (planted("no test", "x + x", "x", "test_adding.py::test_other"), "test_adding.py has no test_other"),
}


@pytest.mark.thorough
def test_a_fault_is_killed_or_survives_or_is_stale(tmp_path: Path) -> None:
    """And the project itself stays as it was."""
    project = tmp_path / "project"
    (project / "package").mkdir(parents=True)
    (project / "package" / "adding.py").write_text(SOURCE)
    (project / "test_adding.py").write_text(TESTS)
    (project / "conftest.py").write_text('import sys\nsys.path.insert(0, "package")\n')
    copies = [run.Copy(tmp_path / f"copy{number}", project) for number in range(2)]
    mutants = [mutant for mutant, _ in CASES.values()]
    verdicts = list(run.judge_all(copies, mutants, lambda copy, one: run.judge(copy, one, 60)))
    states = dict.fromkeys(CASES, run.STALE) | {"killed": run.KILLED, "survived": run.SURVIVED}
    assert {one.name: one.state for one in verdicts} == states
    for one in verdicts:
        assert CASES[one.name][1] in one.words, one
    assert (project / "package" / "adding.py").read_text() == SOURCE


def test_a_wrong_command_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "no-such-fault"]) == 2
    assert capsys.readouterr().out == "--only no-such-fault: there is no such mutant; --list names them\n"


def test_names_are_told_apart_and_say_what_is_wrong() -> None:
    assert [name for name, count in Counter(one.name for one in MUTANTS).items() if count > 1] == []
    for one in MUTANTS:
        assert one.wrong.endswith("."), one.name
        assert one.caught_by, one.name


@pytest.mark.thorough
def test_every_fault_can_still_be_planted() -> None:
    assert [f"{one.name}: {one.words}" for one in run.stale(MUTANTS, run.PROJECT)] == []
