"""`python -m tests.mutations`: plants faults one at a time and says which of them the tests catch."""

import argparse
import os
import sys
import tempfile
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

from . import run
from .catalog import MUTANTS
from .mutant import Mutant, Stale, check_tests, mutated

HELP = """\
Plants faults in a copy of this project, one at a time, and runs the tests that must catch each: first see that they
pass without (`make test`).

A fault is three lines in tests/mutations/catalog/: its name and what is wrong; a file of the package, a function, and
an expression or statement of it that has another one in its place; the tests that fail with it. The copy lies in a
temporary folder, first in PYTHONPATH, so that ranks import the fault too; your own tree is only read, with what you
have changed in it.

  killed    every test that is listed failed
  survived  a test that should catch the fault passes: it has become blind; mend it, or write another
  stale     the fault cannot be planted any more, or its test is gone: plant it in what replaced the place
"""
EXAMPLES = """\
examples:
  python -m tests.mutations                              every fault
  python -m tests.mutations --only 'zero2-*'             some of them
  python -m tests.mutations --stale                      only whether each can still be planted: a second
  python -m tests.mutations --only ddp-sum --against tests/unit   which tests of a folder catch a fault

exit code: 0 all killed, 1 one survived or is stale, 2 a wrong command
"""


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.mutations", description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutants by name or pattern, such as 'comm-*'")
    parser.add_argument("--list", action="store_true", help="name every mutant, its fault and its tests, and end")
    parser.add_argument("--stale", action="store_true", help="only look if every mutant can still be planted, and end")
    parser.add_argument("--against", nargs="+", default=[], metavar="TEST", help="run these; say which catch a mutant")
    cores = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=min(cores, 4), metavar="N", help="copies that run at a time")
    parser.add_argument("--timeout", type=float, default=180, metavar="S", help="seconds for the tests of one mutant")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; it must be at least 1")
    return options


def chosen(patterns: list[str] | None) -> list[Mutant]:
    """The mutants that a pattern names. Raises ValueError for a pattern that names none."""
    for pattern in patterns or []:
        if not any(fnmatchcase(mutant.name, pattern) for mutant in MUTANTS):
            raise ValueError(f"--only {pattern}: there is no such mutant; --list names them")
    return [
        mutant for mutant in MUTANTS if not patterns or any(fnmatchcase(mutant.name, pattern) for pattern in patterns)
    ]


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    try:
        mutants = chosen(options.only)
    except ValueError as error:
        print(error)
        return 2
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}: {mutant.wrong}", *mutant.caught_by, sep="\n    ")
        return 0
    if options.stale:
        stale = 0
        for mutant in mutants:
            try:
                mutated(mutant, run.PROJECT)
                check_tests(mutant, run.PROJECT)
            except Stale as error:
                stale += 1
                print(f"stale {mutant.name}: {error}")
        print(f"{len(mutants) - stale} of {len(mutants)} mutants can be planted")
        return int(stale > 0)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="zerobench-mutants-") as folder:
        copies = [run.Copy(Path(folder) / f"copy{number}") for number in range(min(options.jobs, len(mutants)))]
        for verdict in run.judge_all(copies, mutants, options.timeout, options.against):
            verdicts.append(verdict)
            print(f"{verdict.state:8} {verdict.name} ({verdict.seconds:.1f} s): {verdict.message}", flush=True)
    states = Counter(verdict.state for verdict in verdicts)
    print(*(f"{count} {state}" for state, count in states.items()), sep=", ")
    return 0 if set(states) == {run.KILLED} else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
