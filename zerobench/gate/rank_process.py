"""One rank of a test: this process runs a session of pytest that has the one test, as rank of a gloo group."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..host.environment import rank_environment
from .keys import IN_RANK

QUIET: dict[str, Any] = {
    "numprocesses": None, "dist": "no", "distload": False, "tx": [], "looponfail": False, "usepdb": False,
    "xmlpath": None, "lf": False, "failedfirst": False, "newfirst": False, "stepwise": False, "runxfail": True,
    "pyargs": False,
}  # fmt: skip
"""Options of a rank's session: it starts no workers and writes no reports; xfail is left to the test's process."""

LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Words of a failure that another rank's end has caused."""
LOST_S = 3.0


@dataclass(frozen=True)
class RankJob:
    """Needs of a rank. `place`: the test's file, classes and function; `arguments`: those of the test's session;
    `folder`: where the ranks meet, and leave their temporary files.
    """

    rank: int
    ranks: int
    folder: str
    place: str
    nodeid: str
    arguments: tuple[str, ...]
    working: str
    environment: dict[str, str]
    path: tuple[str, ...]
    covers: bool
    """True where coverage is measured in the test's process, which a rank leaves alone."""
    shown: bool
    """True where output is not captured."""
    timeout_s: float

    def failure(self) -> RankReport | None:
        """Returns the report of a rank on which the test has failed; None where it wrote none."""
        path = self._failure
        return RankReport(**json.loads(path.read_text())) if path.is_file() else None

    def write_failure(self, report: RankReport) -> None:
        """Writes the report of a failure, whole or not at all."""
        aside = self._failure.with_suffix(".aside")
        aside.write_text(json.dumps(asdict(report)))
        aside.replace(self._failure)

    @property
    def _failure(self) -> Path:
        return Path(self.folder) / f"failure{self.rank}.json"


@dataclass(frozen=True)
class RankReport:
    """How the test ended on a rank. `outcome`: passed, failed or skipped; `told`: what it has recorded and noted; `at`:
    when, by the machine's clock that never jumps.
    """

    rank: int
    outcome: str
    words: str
    sections: list[list[str]] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)


class FailedError(Exception):
    """Raised where the test failed on this rank, which has written its report."""


def run_rank(job: RankJob, _tell: Any) -> RankReport:
    """Runs the test as one rank. Returns its report; that of a failure is in a file, and the error ends the others."""
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.working)
    sys.path[:] = job.path
    # The session's own timeout is the launch's, so that a rank which waits for another one does not speak first.
    meeting, timeout_s = f"{job.folder}/rendezvous", 2 * job.timeout_s
    with rank_environment(job.rank, job.ranks, "cpu", "gloo", meeting, threads=1, timeout_s=timeout_s):
        plugin = OneTest(job)
        capture = "no" if job.shown else "sys"  # what is below Python, such as stacks, goes to the rank's log
        arguments = [*job.arguments, f"--capture={capture}", *(["--no-cov"] if job.covers else [])]
        code = pytest.main(arguments, plugins=[plugin])
        report = plugin.report(int(code))
        if report.outcome == "failed":
            job.write_failure(report)
            if any(words in report.words for words in LOST):
                time.sleep(LOST_S)  # until the launcher has seen the other rank's end, which is the cause
            raise FailedError(f"the test failed on rank {job.rank}")
        return report


class OneTest:
    """A plugin of the session of a rank: selects the test, and keeps its reports."""

    def __init__(self, job: RankJob) -> None:
        self._job = job
        self._reports: list[Any] = []
        self._found = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, Any, Any]:
        """Changes the options of the test's session to those of a rank."""
        for name, value in QUIET.items():
            setattr(config.option, name, value)
        config.option.basetemp = f"{self._job.folder}/tmp{self._job.rank}"
        config.args = [self._job.place]
        config.stash[IN_RANK] = self._job.rank
        # By these, plugins know a process that reports to another one.
        names = {
            "workerid": f"rank{self._job.rank}",
            "workercount": self._job.ranks,
            "testrunuid": self._job.folder,
        }
        config.workerinput = names | {"mainargv": list(sys.argv)}  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]
        config.pluginmanager.unregister(name="terminal")
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves the test alone."""
        items[:] = [item for item in items if item.nodeid == self._job.nodeid]
        self._found = bool(items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keeps a file that cannot be read."""
        if report.failed:
            self._reports.append(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the reports of setup, call and teardown."""
        self._reports.append(report)

    def report(self, code: int) -> RankReport:
        """Sums up the test on this rank; `code`: the session's."""
        rank = self._job.rank
        failed = next((one for one in self._reports if one.failed), None)
        if failed is not None:
            sections = [[title, text] for title, text in failed.sections if text.strip()]
            return RankReport(rank, "failed", failed.longreprtext, sections, getattr(failed, "zerobench", {}))
        if not self._found:
            return RankReport(
                rank, "failed", f"zerobench: {self._job.nodeid} was not found there; pytest ended with {code}"
            )
        skipped = next((one for one in self._reports if one.skipped), None)
        if skipped is not None:
            reason = skipped.longrepr[2] if isinstance(skipped.longrepr, tuple) else skipped.longreprtext
            return RankReport(rank, "skipped", str(reason).removeprefix("Skipped: "))
        told: dict[str, Any] = next((one.zerobench for one in self._reports if hasattr(one, "zerobench")), {})
        return RankReport(rank, "passed", "", [], told)
