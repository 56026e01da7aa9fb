"""`python -m tests.mutations`: plants faults one at a time and says which of them the tests catch.

Ranks import the copy too: it comes first in PYTHONPATH, which every process of a test inherits.
"""

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from queue import Queue

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
PROJECT = Path(__file__).resolve().parents[2]
LINKED = {"results"}
"""Folders that tests only read, and that are too large to copy."""
LEFT_OUT = {".git", ".venv", "__pycache__", "build", "dist", "site", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
# What pyproject.toml adds (durations, workers) is for a whole run of the tests.
PYTEST = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--tb=line", "--thorough"]


class Copy:
    """A copy of the project below `root`, with one fault at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        for path in PROJECT.iterdir():
            if path.name in LINKED:
                (root / path.name).symlink_to(path)
            elif path.is_dir() and path.name not in LEFT_OUT:
                shutil.copytree(path, root / path.name, ignore=lambda _, names: LEFT_OUT & {*names})
            elif path.is_file():
                shutil.copy2(path, root / path.name)

    def judge(self, mutant: Mutant, timeout_s: float, against: Sequence[str]) -> tuple[str, str]:
        """Plants a fault and runs the tests that must fail, or those of `against`, of which one must. Returns the
        verdict, and the tests that caught the fault or why there are none.
        """
        try:
            check_tests(mutant, self.root)
            path, text = mutated(mutant, self.root)
            original = path.read_text()
            self._write(path, text)
            try:
                failed = self._failures(against or mutant.caught_by, timeout_s)
            finally:
                self._write(path, original)
        except Stale as error:
            return "stale", str(error)
        if against:
            return "killed" if failed else "survived", "\n".join(failed)
        # a test's node id stands for a file, a function with all its cases, or one case
        blind = [
            test for test in mutant.caught_by
            if not any(case == test or case.startswith((f"{test}[", f"{test}::")) for case in failed)
        ]  # fmt: skip
        return ("survived", f"{' and '.join(blind)} passes") if blind else ("killed", " ".join(failed))

    def _failures(self, tests: Sequence[str], timeout_s: float) -> list[str]:
        """Runs tests by their node ids. Returns those that failed; raises Stale if none could be run."""
        report = self.root / "report.xml"
        report.unlink(missing_ok=True)
        running = subprocess.Popen(
            [*PYTEST, f"--junitxml={report}", *tests], cwd=self.root, start_new_session=True, text=True,
            env=os.environ | {"PYTHONPATH": str(self.root)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            printed, _ = running.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise Stale(f"nothing after {timeout_s:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # pytest and all that it started have ended
                os.killpg(running.pid, signal.SIGKILL)
        cases = list(ElementTree.parse(report).getroot().iter("testcase")) if report.exists() else []
        failed = []
        for case in cases:
            for trouble in (*case.iter("failure"), *case.iter("error")):
                if "collection failure" in (trouble.get("message") or ""):
                    last = (trouble.text or "").strip().splitlines()[-1]
                    raise Stale(f"{case.get('name')} cannot be imported: {last}")
                failed.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
        if all(case.find("skipped") is not None for case in cases):
            raise Stale((printed.strip() or "pytest printed nothing").splitlines()[-1])
        return failed

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # A cached compilation is recognized by size and second: two faults within a second may have both in common.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.mutations", description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="mutants by name or pattern: 'comm-*'")
    parser.add_argument("--list", action="store_true", help="name every mutant, its fault and its tests, and end")
    parser.add_argument("--stale", action="store_true", help="only look if every mutant can still be planted, and end")
    parser.add_argument("--against", nargs="+", default=[], metavar="TEST", help="run these; say which catch a mutant")
    cores = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=min(cores, 4), metavar="N", help="copies that run at a time")
    parser.add_argument("--timeout", type=float, default=180, metavar="S", help="seconds for the tests of one mutant")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; it must be at least 1")
    for pattern in options.only:
        if not any(fnmatchcase(mutant.name, pattern) for mutant in MUTANTS):
            parser.error(f"--only {pattern}: there is no such mutant; --list names them")
    return options


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    mutants = [one for one in MUTANTS if any(fnmatchcase(one.name, pattern) for pattern in options.only)]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}: {mutant.wrong}", *mutant.caught_by, sep="\n    ")
        return 0
    if options.stale:
        stale = 0
        for mutant in mutants:
            try:
                mutated(mutant, PROJECT)
                check_tests(mutant, PROJECT)
            except Stale as error:
                stale += 1
                print(f"stale {mutant.name}: {error}")
        print(f"{len(mutants) - stale} of {len(mutants)} mutants can be planted")
        return int(stale > 0)
    states: Counter[str] = Counter()
    free: Queue[Copy] = Queue()

    def judge(mutant: Mutant) -> None:
        copy, begin = free.get(), time.monotonic()
        try:
            state, message = copy.judge(mutant, options.timeout, options.against)
        finally:
            free.put(copy)
        states[state] += 1
        print(f"{state:8} {mutant.name} ({time.monotonic() - begin:.1f} s): {message}", flush=True)

    with tempfile.TemporaryDirectory(prefix="zerobench-mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        for number in range(min(options.jobs, len(mutants))):
            free.put(Copy(Path(folder) / f"copy{number}"))
        try:
            list(pool.map(judge, mutants))
        finally:
            pool.shutdown(cancel_futures=True)  # after an interrupt the rest are not begun
    print(*(f"{count} {state}" for state, count in states.items()), sep=", ")
    return 0 if set(states) == {"killed"} else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
