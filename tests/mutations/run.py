"""Copies of the project in which mutants are planted one at a time, and what the tests that run there say of each.

Ranks import the copy too: it comes first in PYTHONPATH, which every process of a test inherits.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue

from .mutant import Mutant, Stale, check_tests, mutated

PROJECT = Path(__file__).resolve().parents[2]
LINKED = {"results"}
"""Folders that tests only read, and that are too large to copy."""
LEFT_OUT = {".git", ".venv", "__pycache__", "build", "dist", "site", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
# What pyproject.toml adds (durations, workers) is for a whole run of the tests.
PYTEST = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--tb=line", "--thorough"]

KILLED, SURVIVED, STALE = "killed", "survived", "stale"


@dataclass(frozen=True)
class Verdict:
    """`state`: killed (the tests fail with the fault), survived (one passes), stale (it cannot be planted or judged).

    `message`: the tests that caught it, or why it is not killed.
    """

    name: str
    state: str
    message: str
    seconds: float = 0.0


@dataclass
class Outcome:
    """Tests that ran, by pytest's node ids; `broken`: why they could not be run at all."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    broken: str = ""


class Copy:
    """A copy of the project below `root`, with one fault at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._running: subprocess.Popen[str] | None = None
        root.mkdir()
        for path in PROJECT.iterdir():
            if path.name in LINKED:
                (root / path.name).symlink_to(path)
            elif path.is_dir() and path.name not in LEFT_OUT:
                shutil.copytree(path, root / path.name, ignore=lambda _, names: LEFT_OUT & {*names})
            elif path.is_file():
                shutil.copy2(path, root / path.name)

    def judge(self, mutant: Mutant, timeout_s: float, against: Sequence[str] = ()) -> Verdict:
        """Plants a fault and runs the tests that must fail, or those of `against`, of which one must."""
        begin = time.monotonic()
        try:
            check_tests(mutant, self.root)
            path, text = mutated(mutant, self.root)
        except Stale as error:
            return Verdict(mutant.name, STALE, str(error))
        original = path.read_text()
        self._write(path, text)
        try:
            outcome = self._run(against or mutant.caught_by, timeout_s)
        finally:
            self._write(path, original)
        if outcome.broken:
            state, message = STALE, outcome.broken
        elif against:
            state, message = KILLED if outcome.failed else SURVIVED, "\n".join(outcome.failed)
        elif blind := [test for test in mutant.caught_by if not any(is_of(case, test) for case in outcome.failed)]:
            state, message = SURVIVED, f"{' and '.join(blind)} passes"
        else:
            state, message = KILLED, " ".join(outcome.failed)
        return Verdict(mutant.name, state, message, time.monotonic() - begin)

    def _run(self, tests: Sequence[str], timeout_s: float) -> Outcome:
        """Runs tests by their node ids."""
        report = self.root / "report.xml"
        report.unlink(missing_ok=True)
        self._running = subprocess.Popen(
            [*PYTEST, f"--junitxml={report}", *tests], cwd=self.root, start_new_session=True, text=True,
            env=os.environ | {"PYTHONPATH": str(self.root)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            printed, _ = self._running.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return Outcome(broken=f"nothing after {timeout_s:.0f} s")
        finally:
            self.stop()
        outcome = read_report(report) if report.exists() else Outcome()
        if not outcome.passed and not outcome.failed and not outcome.broken:
            outcome.broken = (printed.strip() or "pytest printed nothing").splitlines()[-1]
        return outcome

    def stop(self) -> None:
        """Ends pytest and every process that it started and left."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(self._running.pid, signal.SIGKILL)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # A cached compilation is recognized by size and second: two faults within a second may have both in common.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def read_report(path: Path) -> Outcome:
    """Reads a JUnit file. A test whose fixture failed has failed; one whose module is no import has not been run."""
    outcome = Outcome()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        trouble = case.find("failure") if case.find("failure") is not None else case.find("error")
        if trouble is None:
            if case.find("skipped") is None:
                outcome.passed.append(name)
        elif "collection failure" in (trouble.get("message") or ""):
            outcome.broken = f"{case.get('name')} cannot be imported: {(trouble.text or '').strip().splitlines()[-1]}"
        else:
            outcome.failed.append(name)
    return outcome


def is_of(case: str, test: str) -> bool:
    """True if a test's case is one of those that a node id stands for: a file's, a function's, or one case of it."""
    return case == test or case.startswith((f"{test}[", f"{test}::"))


def judge_all(
    copies: Sequence[Copy], mutants: Sequence[Mutant], timeout_s: float, against: Sequence[str]
) -> Iterator[Verdict]:
    """Judges each mutant in whichever copy is free."""
    free: Queue[Copy] = Queue()
    for copy in copies:
        free.put(copy)

    def verdict(mutant: Mutant) -> Verdict:
        copy = free.get()
        try:
            return copy.judge(mutant, timeout_s, against)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        try:
            yield from pool.map(verdict, mutants)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.stop()
            raise
