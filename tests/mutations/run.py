"""Mutants, one after the other in each copy of the project, and what became of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import TypeVar

from .copies import Copy, Outcome, is_of
from .mutant import Mutant, PlantedByTest, Stale, check_tests, mutated, place_of

KILLED, SURVIVED, STALE = "killed", "survived", "stale"

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Verdict:
    """`state`: killed (the tests fail with the fault), survived (one passes), stale (it cannot be planted or judged).

    `words`: the tests that caught it, or why it is not killed.
    """

    name: str
    state: str
    words: str
    seconds: float = 0.0


# -- without a fault ----------------------------------------------------------------------------------------


def without_faults(
    made: list[Copy], tests: Iterable[str], timeout_s: float, tell: Callable[[], None]
) -> dict[str, str]:
    """Runs every test once, without any fault: those that are no judge, each with the reason. `tell`: after a file."""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)

    def look(copy: Copy, file: str) -> dict[str, str]:
        found = unfit(files[file], _there(copy, file, files[file], timeout_s))
        tell()
        return found

    return {test: why for found in _in_free(made, look, list(files)) for test, why in found.items()}


def _there(copy: Copy, file: str, tests: list[str], timeout_s: float) -> Outcome:
    """Runs those of `tests` that are there: pytest runs none where it is given a wrong name."""
    outcome = copy.run(tests, timeout_s)
    if outcome.passed or outcome.failed:
        return outcome
    cases = copy.collect(file, timeout_s)
    there = [test for test in tests if any(is_of(case, test) for case in cases)]
    return copy.run(there, timeout_s) if there and there != tests else outcome


def unfit(tests: Iterable[str], outcome: Outcome) -> dict[str, str]:
    """Of tests that ran without any fault, those that are no judge, each with the reason."""
    found = {}
    for test in tests:
        if any(is_of(case, test) for case in outcome.failed):
            found[test] = f"{test} fails without the fault, too"
        elif not any(is_of(case, test) for case in outcome.passed):
            found[test] = f"there is no {test}, or it is skipped here; {outcome.broken}".removesuffix("; ")
    return found


def of_tests(planted: Iterable[PlantedByTest], no_judges: dict[str, str]) -> list[Verdict]:
    """Verdicts of faults that tests plant by themselves, from the run without any other fault."""
    return [
        Verdict(one.name, SURVIVED, no_judges[one.test])
        if one.test in no_judges
        else Verdict(one.name, KILLED, one.test)
        for one in planted
    ]


def stale(mutants: Iterable[Mutant], project: Path) -> list[Verdict]:
    """Finds the mutants that cannot be planted in `project`, or whose tests are not there by name."""
    found = []
    for mutant in mutants:
        try:
            mutated(mutant, place_of(mutant, project))
            check_tests(mutant, project)
        except Stale as error:
            found.append(Verdict(mutant.name, STALE, str(error)))
    return found


# -- with one -----------------------------------------------------------------------------------------------


def judge(copy: Copy, mutant: Mutant, timeout_s: float) -> Verdict:
    """Plants a fault and runs the tests that must fail."""
    outcome = _with(copy, mutant, list(mutant.caught_by), timeout_s, until_one_fails=len(mutant.caught_by) == 1)
    if isinstance(outcome, Verdict):
        return outcome
    silent = [test for test in mutant.caught_by if not any(is_of(case, test) for case in outcome.failed)]
    if silent:
        return Verdict(mutant.name, SURVIVED, f"{' and '.join(silent)} passes", outcome.seconds)
    return Verdict(mutant.name, KILLED, " ".join(outcome.failed), outcome.seconds)


def search(copy: Copy, mutant: Mutant, tests: list[str], timeout_s: float) -> Verdict:
    """Plants a fault and says which of `tests` fail: how a test for a new mutant is found."""
    outcome = _with(copy, mutant, tests, timeout_s)
    if isinstance(outcome, Verdict):
        return outcome
    return Verdict(mutant.name, KILLED if outcome.failed else SURVIVED, "\n".join(outcome.failed), outcome.seconds)


def _with(
    copy: Copy, mutant: Mutant, tests: list[str], timeout_s: float, until_one_fails: bool = False
) -> Outcome | Verdict:
    """Runs `tests` with the fault; returns a verdict at once where they cannot judge it."""
    try:
        with copy.planted(mutant):
            outcome = copy.run(tests, timeout_s, until_one_fails)
    except Stale as stale:
        return Verdict(mutant.name, STALE, str(stale))
    return Verdict(mutant.name, STALE, outcome.broken, outcome.seconds) if outcome.broken else outcome


def judge_all(
    made: list[Copy],
    mutants: list[Mutant],
    no_judges: dict[str, str],
    one: Callable[[Copy, Mutant], Verdict],
    tell: Callable[[Verdict], None],
) -> list[Verdict]:
    """Judges each mutant in whichever copy is free; `tell` hears each verdict as it comes."""

    def verdict(copy: Copy, mutant: Mutant) -> Verdict:
        reasons = [no_judges[test] for test in mutant.caught_by if test in no_judges]
        found = Verdict(mutant.name, STALE, reasons[0]) if reasons else one(copy, mutant)
        tell(found)
        return found

    return _in_free(made, verdict, mutants)


def _in_free(made: list[Copy], work: Callable[[Copy, T], R], items: list[T]) -> list[R]:
    """Calls `work` on each of `items` in a copy that is free; returns what it returns, in the order of `items`."""
    free: Queue[Copy] = Queue()
    for copy in made:
        free.put(copy)

    def in_one(item: T) -> R:
        copy = free.get()
        try:
            return work(copy, item)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(made)) as pool:
        waiting = [pool.submit(in_one, item) for item in items]
        try:
            return [one.result() for one in waiting]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in made:
                copy.stop()
            raise
