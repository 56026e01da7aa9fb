"""A copy of the project in which a fault can be planted, and the tests that run in it.

Ranks import the copy too: it comes first in PYTHONPATH, which every process of a test inherits.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .mutant import Mutant, mutated
from .preloaded import LIBRARIES

PROJECT = Path(__file__).resolve().parents[2]
LINKED = {"results"}
"""Folders that tests only read, and that are too large to copy."""
LEFT_OUT = {".git", ".venv", "__pycache__", "build", "dist", "site", ".pytest_cache", ".mypy_cache", ".ruff_cache"}


@dataclass
class Outcome:
    """Tests that ran, by pytest's node ids."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    broken: str = ""  # why the tests could not be run at all
    seconds: float = 0.0


class Copy:
    """A copy of `project` below `root`, with one fault at a time."""

    def __init__(self, root: Path, project: Path, libraries: Sequence[str]) -> None:
        self.root = root
        self.running: int | None = None  # the process of pytest
        for path in project.iterdir():
            if path.name in LINKED:
                (root / path.name).symlink_to(path)
            elif path.is_dir() and path.name not in LEFT_OUT:
                shutil.copytree(path, root / path.name, ignore=lambda _, names: LEFT_OUT & {*names})
            elif path.is_file():
                shutil.copy2(path, root / path.name)
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("preloaded.py")), *libraries],
            env=os.environ | {"PYTHONPATH": "", "OMP_WAIT_POLICY": "passive"},
            text=True, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        path, text = mutated(mutant, self.root)
        original = path.read_text()
        self._write(path, text)
        try:
            yield
        finally:
            self._write(path, original)

    def run(self, tests: list[str], timeout_s: float, until_one_fails: bool = False) -> Outcome:
        """Runs tests by their node ids."""
        report = self.root / "report.xml"
        report.unlink(missing_ok=True)
        begin = time.monotonic()
        try:
            said = self._pytest(
                timeout_s, f"--junitxml={report}", "--tb=line", *(["-x"] if until_one_fails else []), *tests
            )
        except TimeoutError:
            return Outcome(broken=f"nothing after {timeout_s:.0f} s", seconds=time.monotonic() - begin)
        outcome = read_report(report) if report.exists() else Outcome()
        outcome.seconds = time.monotonic() - begin
        if not outcome.passed and not outcome.failed and not outcome.broken:
            outcome.broken = said.strip().splitlines()[-1] if said.strip() else "pytest said nothing"
        return outcome

    def _pytest(self, timeout_s: float, *flags: str) -> str:
        """Runs pytest in the copy, and returns what it says. Raises TimeoutError."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        said = self.root / "said.txt"
        # What pyproject.toml adds (durations, workers) is for a whole run of the tests.
        request = ["-o", "addopts=", "-p", "no:cacheprovider", "-q", "--thorough", *flags]
        print(
            json.dumps({"folder": str(self.root), "said": str(said), "flags": request}),
            file=self._server.stdin,
            flush=True,
        )
        self.running = int(self._server.stdout.readline())
        ended, _, _ = select.select([self._server.stdout], [], [], timeout_s)
        self.stop()
        self._server.stdout.readline()
        if not ended:
            raise TimeoutError
        return said.read_text()

    def stop(self) -> None:
        """Ends pytest and every process that it started and left."""
        if self.running is not None:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(self.running, signal.SIGKILL)

    def close(self) -> None:
        """Ends what runs."""
        self.stop()
        self._server.kill()
        self._server.communicate()

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # A cached compilation is told by size and second: two faults within a second may have both in common.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


@contextmanager
def copies(count: int, project: Path = PROJECT, libraries: Sequence[str] = LIBRARIES) -> Iterator[list[Copy]]:
    """`count` copies in temporary folders, removed at the end, and their tests ended with them."""
    with tempfile.TemporaryDirectory(prefix="zerobench-mutants-") as folder:
        made: list[Copy] = []
        try:
            for number in range(count):
                root = Path(folder) / f"copy{number}"
                root.mkdir()
                made.append(Copy(root, project, libraries))
            yield made
        finally:
            for copy in made:
                copy.close()


def read_report(path: Path) -> Outcome:
    """Reads a JUnit file. A test whose fixture failed has failed; one whose module is no import has not been run."""
    outcome = Outcome()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        module = case.get("classname", "")
        name = f"{module.replace('.', '/')}.py::{case.get('name')}"
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
