"""`python -m tests.mutations`: plants faults one at a time and says which of them the tests catch."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from fnmatch import fnmatchcase

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import run
from .catalog import MUTANTS
from .copies import PROJECT, copies
from .mutant import Mutant

COLORS = {run.KILLED: "green", run.SURVIVED: "bold red", run.STALE: "yellow"}
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
    parser.add_argument("--against", nargs="+", metavar="TEST", help="run these, and say which catch each mutant")
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
        if not any(fnmatchcase(one.name, pattern) for one in MUTANTS):
            raise ValueError(f"--only {pattern}: there is no such mutant; --list names them")
    return [one for one in MUTANTS if not patterns or any(fnmatchcase(one.name, pattern) for pattern in patterns)]


def listed(mutants: list[Mutant], console: Console) -> None:
    for mutant in mutants:
        console.print(f"[bold]{mutant.name}[/bold]: {escape(mutant.wrong)}", soft_wrap=True)
        for test in mutant.caught_by:
            console.print(f"    {escape(test)}", soft_wrap=True, highlight=False)


def main(arguments: list[str]) -> int:
    console = Console(highlight=False)
    options = parsed(arguments)
    try:
        mutants = chosen(options.only)
    except ValueError as error:
        console.print(str(error), markup=False)
        return 2
    if options.list:
        listed(mutants, console)
        return 0
    if options.stale:
        verdicts = run.stale(mutants, PROJECT)
        for one in verdicts:
            _tell(console, one)
        console.print(f"{len(mutants) - len(verdicts)} of {len(mutants)} mutants can be planted")
        return 1 if verdicts else 0
    verdicts = everything(options, mutants, console)
    summary(verdicts, console)
    return 0 if all(one.state == run.KILLED for one in verdicts) else 1


def everything(options: argparse.Namespace, mutants: list[Mutant], console: Console) -> list[run.Verdict]:
    """Runs each mutant; a line for each as it ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    jobs = min(options.jobs, len(mutants))
    with copies(jobs) as made, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("mutants", total=len(mutants))

        def tell(one: run.Verdict) -> None:
            progress.console.print(line(one), soft_wrap=True)
            progress.advance(task)

        def judge(copy: run.Copy, mutant: Mutant) -> run.Verdict:
            if options.against:
                return run.search(copy, mutant, options.against, options.timeout)
            return run.judge(copy, mutant, options.timeout)

        return run.judge_all(made, mutants, judge, tell)


def line(one: run.Verdict) -> str:
    color = COLORS[one.state]
    return f"[{color}]{one.state:8}[/{color}] {one.name} ({one.seconds:.1f} s): {escape(one.words)}"


def _tell(console: Console, one: run.Verdict) -> None:
    console.print(line(one), soft_wrap=True)


def summary(verdicts: list[run.Verdict], console: Console) -> None:
    """Prints how many became what, and again those that were not killed."""
    counts = Counter(one.state for one in verdicts)
    table = Table("state", "mutants")
    for state, color in COLORS.items():
        table.add_row(f"[{color}]{state}[/{color}]", str(counts[state]))
    console.print(table)
    for one in verdicts:
        if one.state != run.KILLED:
            _tell(console, one)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
