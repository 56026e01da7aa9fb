"""pytest's hooks: the marker `zerobench`, the fixture `zerobench_watch`, and the options of the command line.

Everything else is imported by tests that use them: a session without such a test loads neither torch nor pandas.

    setup      the marker is read and compared with the fixture; a test in ranks needs no fixtures in this process
    call       the test's body runs, here or in ranks; then its watches are judged, or recorded
    report     recorded values travel with the report, also from a worker of pytest-xdist
    end        records are written, by one process
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .limits import Request
    from .verdict import Watches

MARKER, FIXTURE = "zerobench", "zerobench_watch"

IN_RANK = "zerobench_rank"
"""Option of a session in a process that runs a test of `ranks=N` (ranks.py): the rank."""

HELP = (
    "zerobench(LIMITS..., ranks=None, timeout_s=300, recorded=None): hold the memory and traffic of the loops that the"
    ' test watches with zerobench_watch: peak="<= 24 GiB", states="<= 16 psi + 2 unit", volume_psi=2, leaks=0; without'
    " a limit, what pytest --zerobench-record has recorded; ranks=N runs the test in N fresh processes of a gloo group."
)

USED: pytest.StashKey[bool] = pytest.StashKey()
"""Key of a test's stash: if it takes the fixture; a test in ranks loses its list of fixtures at its first setup."""
REQUEST: pytest.StashKey[Request] = pytest.StashKey()
WATCHES: pytest.StashKey[Watches] = pytest.StashKey()
OUTCOME: pytest.StashKey[dict[str, Any]] = pytest.StashKey()
"""Key of a test's stash: its recorded values and notes, as plain values."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("zerobench", "a memory gate")
    group.addoption(
        "--zerobench-record", action="store_true", help="measure the limits of tests marked zerobench and write them"
    )
    group.addoption(
        "--zerobench-to", metavar="DIR", help="keep the tables of all watches there, a results folder of zerobench"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker, and the hooks of the session."""
    config.addinivalue_line("markers", HELP)
    config.pluginmanager.register(Session(config), "zerobench-session")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Reads the marker, and fails a test that has only one of marker and fixture."""
    used = item.stash.setdefault(USED, FIXTURE in getattr(item, "fixturenames", ()))
    marked, kind = item.get_closest_marker(MARKER), getattr(item, "cls", None)
    if not marked and not used:
        return
    problem = ""
    if not marked:
        problem = f" takes {FIXTURE} and has no limits; add @pytest.mark.{MARKER}(leaks=0), or others"
    elif not used and kind is not None and any(base.__module__ == "unittest.case" for base in kind.__mro__):
        instead = "write it as a function, or in a class without a base"
        problem = f": a method of unittest.TestCase takes no fixtures; {instead}"
    elif not used:
        problem = f" is marked and takes no {FIXTURE}, so nothing would be measured; add the argument"
    if problem:
        pytest.fail(f"zerobench: {item.name}{problem}", pytrace=False)
    from .limits import read

    if OUTCOME in item.stash:  # of an attempt before, under a plugin that reruns failed tests
        del item.stash[OUTCOME]
    try:
        item.stash[REQUEST] = read(item.iter_markers(MARKER))
    except ValueError as error:
        pytest.fail(str(error), pytrace=False)
    if _runs_in_ranks(item):
        item.fixturenames = []  # type: ignore[attr-defined]  # its ranks set them up


def _runs_in_ranks(item: pytest.Item) -> bool:
    return item.stash[REQUEST].ranks is not None and not hasattr(item.config.option, IN_RANK)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Excludes tensors that already exist from a test's watches: its figures do not depend on earlier tests."""
    marker = item.get_closest_marker(MARKER)
    ranks = None if marker is None or hasattr(item.config.option, IN_RANK) else marker.kwargs.get("ranks")
    if FIXTURE not in getattr(item, "fixturenames", ()) or ranks is not None:
        return (yield)
    from ..watching.held_tensors import leave_out

    with leave_out():
        return (yield)


@pytest.fixture(name=FIXTURE)
def zerobench_watch(request: pytest.FixtureRequest) -> Iterator[Watches]:
    """Watches training loops as `zerobench.watch` does; the limits are checked once the test's body has passed."""
    from .verdict import Watches

    item = request.node
    if REQUEST not in item.stash:
        pytest.fail(
            f"zerobench: {item.name} asks for {FIXTURE} by getfixturevalue; take it as an argument", pytrace=False
        )
    to = request.config.getoption("--zerobench-to")
    file, _, name = item.nodeid.partition("::")
    item.stash[WATCHES] = watches = Watches(name, f"{file}::", Path(to) if to else None)
    yield watches
    watches.end()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Judges, or records, the watches of a test whose body has passed."""
    if REQUEST not in pyfuncitem.stash or _runs_in_ranks(pyfuncitem):
        return (yield)
    from ..watching import WatchError
    from . import verdict
    from .budget_file import SUFFIX
    from .limits import GateError
    from .verdict import Home

    problem, file = "", pyfuncitem.path
    try:
        result = yield
        watches, record = pyfuncitem.stash[WATCHES], bool(pyfuncitem.config.getoption("--zerobench-record"))
        home = Home(file.with_name(f"{file.stem}{SUFFIX}"), pyfuncitem.nodeid)
        judged = verdict.judge(list(watches.made.values()), pyfuncitem.stash[REQUEST], home, record)
    except (GateError, WatchError) as error:
        problem = str(error)
    if problem:  # outside of the block, so that the report has the message alone
        pytest.fail(problem, pytrace=False)
    recorded = [] if judged.failures else [(str(home.path), row) for row in judged.recorded]
    pyfuncitem.stash[OUTCOME] = {"recorded": recorded, "notes": judged.notes}
    if judged.failures:
        pytest.fail("\n".join(judged.failures), pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Adds a test's recorded values and notes to its report."""
    report = yield
    if call.when == "call" and OUTCOME in item.stash:
        report.zerobench = item.stash[OUTCOME]
    return report


class Session:
    """Hooks of a session: running tests in ranks, and collecting the contents of reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._recorded: list[tuple[str, dict[str, Any]]] = []
        self._notes: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Runs a test of `ranks=N` in its ranks."""
        if REQUEST not in pyfuncitem.stash or not _runs_in_ranks(pyfuncitem):
            return None
        from .ranks import run

        options = pyfuncitem.stash[REQUEST]
        report = run(pyfuncitem, options.ranks or 1, options.timeout_s)
        pyfuncitem.stash[OUTCOME] = report.recorded_and_notes
        if report.outcome == "failed":
            pytest.fail(report.message, pytrace=False)
        if report.outcome == "skipped":
            pytest.skip(report.message)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collects a test's recorded values, from this process or from a worker."""
        if outcome := getattr(report, "zerobench", None):
            self._recorded += [(path, row) for path, row in outcome["recorded"]]
            self._notes += outcome["notes"]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes records, in the process that has all reports."""
        if not self._recorded or hasattr(self._config, "workerinput"):
            return
        from .verdict import write

        try:
            self._notes += write(self._recorded)
        except (OSError, ValueError) as error:
            self._notes.append(f"nothing was recorded: {error}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints the records that were written, and limits that a test now beats."""
        if self._notes:
            terminalreporter.section(MARKER)
            for note in self._notes:
                terminalreporter.write_line(note)
