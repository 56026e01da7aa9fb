"""The runner of planted faults tells those that tests catch from those that they do not, on a project of two files."""

from collections import Counter

import pytest

from tests.mutations import run
from tests.mutations.__main__ import main
from tests.mutations.catalog import MUTANTS
from tests.mutations.mutant import Change, Mutant


def planted(name: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, "", (Change("adding.py", "double", old, new),), tests, "package")


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
