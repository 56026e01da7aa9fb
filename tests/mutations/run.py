"""Mutants, one after the other in each copy of the project, and what became of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from .copies import Copy, Outcome, is_of
from .mutant import Mutant, Stale, check_tests, mutated

KILLED, SURVIVED, STALE = "killed", "survived", "stale"


@dataclass(frozen=True)
class Verdict:
    """`state`: killed (the tests fail with the fault), survived (one passes), stale (it cannot be planted or judged).

    `words`: the tests that caught it, or why it is not killed.
    """

    name: str
    state: str
    words: str
    seconds: float = 0.0


def stale(mutants: Iterable[Mutant], project: Path) -> list[Verdict]:
    """Finds the mutants that cannot be planted in `project`, or whose tests are not there by name."""
    found = []
    for mutant in mutants:
        try:
            mutated(mutant, project)
            check_tests(mutant, project)
        except Stale as error:
            found.append(Verdict(mutant.name, STALE, str(error)))
    return found


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
        check_tests(mutant, copy.root)
        with copy.planted(mutant):
            outcome = copy.run(tests, timeout_s, until_one_fails)
    except Stale as stale:
        return Verdict(mutant.name, STALE, str(stale))
    return Verdict(mutant.name, STALE, outcome.broken, outcome.seconds) if outcome.broken else outcome


def judge_all(
    made: list[Copy], mutants: list[Mutant], one: Callable[[Copy, Mutant], Verdict], tell: Callable[[Verdict], None]
) -> list[Verdict]:
    """Judges each mutant in whichever copy is free; `tell` hears each verdict as it comes."""
    free: Queue[Copy] = Queue()
    for copy in made:
        free.put(copy)

    def verdict(mutant: Mutant) -> Verdict:
        copy = free.get()
        try:
            found = one(copy, mutant)
        finally:
            free.put(copy)
        tell(found)
        return found

    with ThreadPoolExecutor(len(made)) as pool:
        waiting = [pool.submit(verdict, mutant) for mutant in mutants]
        try:
            return [one.result() for one in waiting]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in made:
                copy.stop()
            raise
