"""A test in ranks: N fresh processes that run only this test, in a gloo group on this machine's loopback interface.

job       the data that a rank needs to run the same session as this one, with this test only
report    how the test ended on a rank: passed, failed or skipped, with its message and output
verdict   rank 0 has the tables and judges; a failure shows the first rank that failed

The ranks are started by zerobench's launcher: they end with this process, and if one fails the others are ended.
A rank is a process that runs a pytest session with the one test.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ..host.environment import rank_environment
from ..host.files import replace_text
from ..host.temporary import temporary_folder
from ..ranks.start_ranks import LaunchError, launch

LAST = 3000
"""Characters of a rank's output that a failure shows."""

_BELOW = re.compile(
    r' *File ".*(/_pytest/|/pluggy/|/pytest/|/multiprocessing/|/zerobench/(budgets|ranks)/|<string>)|Extension modules:'
)
"""Lines of a stack that are the same in every rank."""


def run(item: pytest.Function, ranks: int, timeout_s: float) -> RankReport:
    """Runs a test in ranks. Returns rank 0's report, or a failure report on behalf of all ranks."""
    first: RankReport
    ended: LaunchError | None = None
    with temporary_folder() as folder:
        jobs = _jobs(item, ranks, folder, timeout_s)
        try:
            first = launch(run_rank, jobs, folder / "logs", timeout_s)[0]
        except LaunchError as error:
            ended = error
        failed = [report for job in jobs if (report := job.failure()) is not None]
        logs = {}  # the end of each rank's output; stacks are reduced to frames outside pytest and zerobench
        for rank in range(ranks):
            log = folder / "logs" / f"rank{rank}.log"
            lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
            logs[rank] = "\n".join(line for line in lines if not _BELOW.match(line))[-LAST:].strip()
    if jobs[0].shown:
        print("".join(f"rank {rank}:\n{log}\n" for rank, log in logs.items() if log))
    if ended is None:
        return first
    reported = {report.rank for report in failed}
    died = [failure for failure in ended.failures if failure.rank not in reported]
    if failed and all(failure.status == "timeout" for failure in died):
        first = min(failed, key=lambda report: report.at)
        output = [f"-- {title}, rank {first.rank} --\n{text.rstrip()[-LAST:]}" for title, text in first.sections]
        head = "" if first.recorded_and_notes else f"on rank {first.rank} of {ranks}:\n"  # a verdict is on all ranks
        return replace(first, message="\n".join([f"{head}{first.message}", *output]))
    if ended.status == "timeout":
        running = ", ".join(str(failure.rank) for failure in died)
        message = f"zerobench: timeout_s={timeout_s:g} was over and rank {running} of {ranks} still ran"
    else:
        message = f"zerobench: rank {died[0].rank} {died[0].text}" if died else f"zerobench: {ended.reason}"
    shown = [f"-- end of the output of rank {rank} --\n{log}" for rank, log in logs.items() if log]
    return RankReport(0, "failed", "\n".join([message, *shown]))


def _jobs(item: pytest.Function, ranks: int, folder: Path, timeout_s: float) -> list[GateRank]:
    config, classes = item.config, [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    with socket.socket() as free:  # for code that reads these variables in the ranks; the group does not use them
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = dict(os.environ) | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        GateRank(
            rank, ranks, str(folder), "::".join([str(item.path), *classes, item.originalname]), item.nodeid,
            tuple(str(argument) for argument in config.invocation_params.args), str(config.invocation_params.dir),
            variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, tuple(sys.path),
            config.pluginmanager.hasplugin("pytest_cov"), config.getoption("capture", "fd") == "no", timeout_s,
        )
        for rank in range(ranks)
    ]  # fmt: skip


QUIET: dict[str, Any] = {
    "numprocesses": None, "dist": "no", "distload": False, "tx": [], "looponfail": False, "usepdb": False,
    "xmlpath": None, "lf": False, "failedfirst": False, "newfirst": False, "stepwise": False, "runxfail": True,
    "pyargs": False,
}  # fmt: skip
"""Options of a rank's session: it starts no workers and writes no reports; xfail is left to the test's process."""

LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Parts of error messages that are caused by the end of another rank."""
LOST_S = 3.0


@dataclass(frozen=True)
class GateRank:
    """Input of a rank."""

    rank: int
    ranks: int
    folder: str
    """For the rendezvous and temporary files."""
    target: str
    """The test's file, classes and function."""
    nodeid: str
    arguments: tuple[str, ...]
    """Arguments of the test's session."""
    working: str
    environment: dict[str, str]
    path: tuple[str, ...]
    covers: bool
    """True if coverage is measured in the test's process; ranks then measure none."""
    shown: bool
    """True if output is not captured."""
    timeout_s: float

    def failure(self) -> RankReport | None:
        """Returns the report of a rank on which the test failed; None if it wrote none."""
        path = Path(self.folder) / f"failure{self.rank}.json"
        return RankReport(**json.loads(path.read_text())) if path.is_file() else None


@dataclass(frozen=True)
class RankReport:
    """How the test ended on a rank."""

    rank: int
    outcome: str
    """passed, failed or skipped."""
    message: str
    sections: list[list[str]] = field(default_factory=list)
    recorded_and_notes: dict[str, Any] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)


class FailedError(Exception):
    """Raised if the test failed on this rank, which has written its report."""


def run_rank(job: GateRank, _report: Any) -> RankReport:
    """Runs the test as one rank. Returns its report; a failure's goes to a file, and its error ends the others."""
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.working)
    sys.path[:] = job.path
    # The session's own timeout exceeds the launch's, so that a rank which waits for another one does not report first.
    meeting, timeout_s = f"{job.folder}/rendezvous", 2 * job.timeout_s
    with rank_environment(job.rank, job.ranks, "cpu", "gloo", meeting, threads=1, timeout_s=timeout_s):
        plugin = OneTest(job)
        capture = "no" if job.shown else "sys"  # what is below Python, such as stacks, goes to the rank's log
        arguments = [*job.arguments, f"--capture={capture}", *(["--no-cov"] if job.covers else [])]
        code = pytest.main(arguments, plugins=[plugin])
        report = plugin.report(int(code))
        if report.outcome == "failed":
            replace_text(Path(job.folder) / f"failure{job.rank}.json", json.dumps(asdict(report)))
            if any(part in report.message for part in LOST):
                time.sleep(LOST_S)  # until the launcher has seen the other rank's end, which is the cause
            raise FailedError(f"the test failed on rank {job.rank}")
        return report


class OneTest:
    """A plugin of a rank's session: selects the test, and keeps its reports."""

    def __init__(self, job: GateRank) -> None:
        self._job = job
        self._reports: list[Any] = []
        self._is_collected = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, Any, Any]:
        """Adapts the options of the test's session for a rank."""
        for name, value in QUIET.items():
            setattr(config.option, name, value)
        config.option.basetemp = f"{self._job.folder}/tmp{self._job.rank}"
        config.args = [self._job.target]
        config.option.zerobench_rank = self._job.rank  # which plugin.py reads
        # By these names, plugins recognize a process that reports to another one.
        names = {"workerid": f"rank{self._job.rank}", "workercount": self._job.ranks, "testrunuid": self._job.folder}
        config.workerinput = names | {"mainargv": list(sys.argv)}  # type: ignore[attr-defined]
        config.workeroutput = {}  # type: ignore[attr-defined]
        config.pluginmanager.unregister(name="terminal")
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Deselects all other tests."""
        items[:] = [item for item in items if item.nodeid == self._job.nodeid]
        self._is_collected = bool(items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keeps the report of a file that cannot be collected."""
        if report.failed:
            self._reports.append(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the reports of setup, call and teardown."""
        self._reports.append(report)

    def report(self, code: int) -> RankReport:
        """Summarizes the test on this rank; `code`: the session's exit code."""
        rank = self._job.rank
        for report in self._reports:
            if report.failed:
                sections = [[title, text] for title, text in report.sections if text.strip()]
                return RankReport(rank, "failed", report.longreprtext, sections, getattr(report, "zerobench", {}))
        if not self._is_collected:
            message = f"zerobench: {self._job.nodeid} was not found there; pytest ended with {code}"
            return RankReport(rank, "failed", message)
        for report in self._reports:
            if report.skipped:
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
                return RankReport(rank, "skipped", str(reason).removeprefix("Skipped: "))
        outcomes = (report.zerobench for report in self._reports if hasattr(report, "zerobench"))
        return RankReport(rank, "passed", "", [], next(outcomes, {}))
