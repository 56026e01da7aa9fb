"""A sweep that is killed or stopped at any change of its results folder is completed by the next: nothing is lost,
nothing is there twice, nothing is left.

change     a call that changes files: open for writing, mkdir, rename, remove, rmdir, and what takes a lock
instant    the moment before a change, numbered from 1

The sweep runs in a process forked for it, with the records of ranks that an earlier run has left, so that only files
are at work. Python's audit events tell of each change; what C++ writes (parquet) lies between two of them.
"""

import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import zerobench
from tests.cells import cell
from zerobench.config.cell import Cell
from zerobench.config.schema import Launch, Measure
from zerobench.host.signals import interrupt_on
from zerobench.rank_record import RankRecord
from zerobench.results import selection
from zerobench.results.tables import TABLES
from zerobench.sweep import cell as life
from zerobench.sweep.command import run_cells

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "fcntl.flock", "fcntl.lockf", "shutil.rmtree")
LOCKS = ("fcntl.flock", "fcntl.lockf")
"""Events of a descriptor, which does not tell its file."""

NOT_REPEATED = (
    "run_id", "started", "seconds", "command", "config", "wall_s", "resident_bytes", "loopback_bytes",
    "reason", "commit", "source_hash", "others_cores", "tokens_per_s", "mfu", "hfu", "overlap", "launcher",
)  # fmt: skip
"""Columns that two sweeps over equal cells need not agree in, besides times."""

Records = dict[str, list[RankRecord]]
"""Cell -> what its ranks returned, by cell_id."""


def is_change(event: str, arguments: Sequence[Any], below: str) -> bool:
    """Returns True where an audit event is a change below a folder."""
    if event == "open":
        path, mode, flags = (*arguments, None, None)[:3]
        writes = bool(flags and flags & WRITES) or bool(mode and set(mode) & set("wax+"))
        return writes and str(path).startswith(below)
    return event in LOCKS or (event in CHANGES and str(arguments[0]).startswith(below))


def repeated(columns: Any) -> list[str]:
    """Returns the columns that two sweeps over equal cells must agree in."""
    return [name for name in columns if name not in NOT_REPEATED and not name.endswith(("_s", "_s_low", "_s_high"))]


def last_of_each(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the last run of each cell and repeat, by that index."""
    begun = runs.sort_values("run_id", key=lambda names: names.map(selection.split), kind="stable")
    return begun.drop_duplicates(["cell_id", "repeat"], keep="last").set_index(["cell_id", "repeat"], drop=False)


def age(where: Path) -> None:
    """Makes what is hidden in a results folder as old as if it had been left long ago."""
    for path in where.glob(".*"):
        os.utime(path, (0, 0))


def run_until(
    instant: int, how: signal.Signals, cells: list[Cell], records: Records, where: Path, counted: Path | None = None
) -> int:
    """Runs a sweep in a process of its own that ends at an instant; returns its wait status.

    `instant`: 0 for a sweep that nothing ends; the number of its changes is then written to the file `counted`.
    """
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    code = 99
    try:
        changes = _end_at(instant, how, str(where))
        code = _sweep(cells, records)
        if counted is not None:
            counted.write_text(str(changes()))
    finally:
        os._exit(code)


def _end_at(instant: int, how: signal.Signals, below: str) -> Callable[[], int]:
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if is_change(event, arguments, below):
            seen += 1
            if seen == instant:
                os.kill(os.getpid(), how)

    sys.addaudithook(hook)
    return lambda: seen


def _sweep(cells: list[Cell], records: Records) -> int:
    life._run_passes = lambda cell, *_: records[cell.cell_id]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            with interrupt_on([signal.SIGTERM]):
                return run_cells(cells)[0]
        except KeyboardInterrupt:
            return 130


def cells_in(where: Path) -> list[Cell]:
    """A run that waits for its reference, the reference, and an invalid cell."""
    common: dict[str, Any] = {
        "model": "mlp", "results_dir": str(where), "measure": Measure(2, 2, passes="accounted"),
    }  # fmt: skip
    cells = [cell(name, 1, **common) for name in ("zero2", "ddp")]
    cells = [one.changed(launch=Launch(threads=1)) for one in cells]
    return [*cells, cell("ddp", 3, batch=4, **common)]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Runs each cell once and keeps what its ranks return."""
    found: Records = {}
    launch = life.launch

    def keep(worker: Any, jobs: Any, *more: Any) -> list[Any]:
        found[jobs[0].config.strategy.name] = results = launch(worker, jobs, *more)
        return results

    cells = cells_in(tmp_path_factory.mktemp("first"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(life, "launch", keep)
        for one in cells[:2]:
            life.run_cell(one, lambda _: None)
    return {one.cell_id: found[one.config.strategy.name] for one in cells[:2]}


@pytest.fixture(scope="module")
def calm(records: Records, tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, int]:
    """The runs of an undisturbed sweep, and the number of its changes."""
    where, counted = tmp_path_factory.mktemp("calm") / "runs", tmp_path_factory.mktemp("calm") / "changes"
    assert run_until(0, signal.SIGKILL, cells_in(where), records, where, counted) == 1 << 8, "one cell is invalid"
    return zerobench.load(where).runs, int(counted.read_text())


def try_instant(number: int, how: signal.Signals, records: Records, calm: pd.DataFrame, where: Path) -> None:
    """Ends a sweep at an instant, lets another complete it, and compares; reading warns of nothing in between."""
    cells = cells_in(where)
    ended = run_until(number, how, cells, records, where)
    if how == signal.SIGKILL:
        assert os.WTERMSIG(ended) == signal.SIGKILL, ended
    else:
        assert os.waitstatus_to_exitcode(ended) in (130, 1), "an interruption while the last words are written ends it"
    before = set(zerobench.load(where).runs.run_id) if where.is_dir() else set()
    age(where)
    assert run_until(0, how, cells, records, where) == 1 << 8
    after = zerobench.load(where)
    assert before <= set(after.runs.run_id), "a finished run is never lost"
    assert list(after.runs[after.runs.status == "ok"].groupby("cell_id").size()) == [1, 1], "nor measured twice"
    names = repeated(calm.columns)
    pd.testing.assert_frame_equal(
        last_of_each(after.runs)[names].sort_index(), last_of_each(calm)[names].sort_index(), check_exact=True
    )
    finished = set(after.runs[after.runs.status == "ok"].run_id)
    assert all(finished <= set(getattr(after, name).run_id) for name in ("steps", "memory", "tensors"))
    assert not list(where.glob(".*")), "nothing half done is left"
    assert not list(where.glob("*/.*")), "in no run either"


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_sweep_that_ends_at_any_change_is_completed(
    how: signal.Signals, records: Records, calm: Any, tmp_path: Path, thorough: bool
) -> None:
    """At some changes in every run, at each in `make test-all`."""
    runs, changes = calm
    assert changes > len(TABLES)
    for number in range(1, changes + 1, 1 if thorough else 40):
        try_instant(number, how, records, runs, tmp_path / str(number) / "runs")
