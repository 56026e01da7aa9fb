"""Results folders as people have them: with odd names, full, read-only, removed midway."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import zerobench
from tests.cells import cell
from tests.faults.disk import mounted
from tests.unit.test_status_show_prune import make
from zerobench import cli
from zerobench.config.cell import Cell
from zerobench.config.schema import Launch
from zerobench.host import files
from zerobench.host.temporary import LEASE, temporary_folder
from zerobench.ranks import fork_server
from zerobench.results import folders
from zerobench.results.folders import Unwritten, temporary_results, unwritten_messages
from zerobench.sweep.cell import find_or_run, run_cell, run_prefix
from zerobench.sweep.command import check_folders
from zerobench.sweep.sweep import Sweep

ODD = "a b#c?d%20;e&f'g\"h[i]*{j}$k\\l\nm~é"
"""A name that the system takes, with what means something to URLs, shells, globs, Hydra's grammar or people."""


def test_ranks_meet_in_a_folder_of_any_name(tmp_path: Path) -> None:
    home = tmp_path / ODD
    row = run_cell(
        cell("zero3", 2, results_dir=str(home)).changed(launch=Launch(timeout_s=100, threads=1)), lambda _: None
    )
    assert (row.status, row.reason) == ("ok", "")
    assert [path.name for path in tmp_path.iterdir()] == [ODD], "nothing lands beside it"
    assert list(zerobench.load(home).runs.status) == ["ok"]


NOWHERE = "/proc/zerobench/runs"
"""A folder that nobody can make, the superuser included."""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's temporary folder, for this test."""
    fork_server.context()  # whose folder is this process's, in the one that it had before
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    temporary_results.cache_clear()
    yield folder
    temporary_results.cache_clear()


def simulated(results_dir: Path | str, **more: Any) -> Cell:
    """A cell that takes no time."""
    return cell("zero2", 2, results_dir=str(results_dir), backend="simulated", **more)


def test_a_folder_that_cannot_be_made_is_refused_before_any_rank(temporary: Path, capsys) -> None:
    for verb in ([], ["noise", "record"], ["budget", "record"]):
        assert cli.run([*verb, "world_size=1", f"+results_dir={NOWHERE}", "model=gpt_tiny"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert all(NOWHERE in line or "/proc is no folder" in line for line in told)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("of", ["results folder", "working folder"])
def test_folder_whose_name_is_not_utf8_is_refused_before_any_rank(of: str, tmp_path: Path, monkeypatch, capsys) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe d"))
    odd.mkdir()
    results = tmp_path / "link"
    if of == "working folder":
        monkeypatch.chdir(odd)
        results = Path("results/runs")
    else:
        results.symlink_to(odd)
    assert cli.run(["world_size=1", f"+results_dir={results}", "model=gpt_tiny"]) == 2
    told = capsys.readouterr().err
    assert f"zerobench: results_dir={results}: it cannot be written to (its path, b'{tmp_path}/" in told
    assert "\\xff\\xfe d" in told
    assert "is not UTF-8); name another folder\n" in told
    assert len(told.splitlines()) == 1
    assert list(odd.iterdir()) == []


def test_a_run_that_fits_nowhere_is_a_row_all_the_same(temporary: Path, monkeypatch) -> None:
    sweep = Sweep(MagicMock())
    sweep.run([simulated(NOWHERE)])
    kept = next(temporary.iterdir())
    assert sweep.rows[0].status == "ok"
    assert zerobench.load(kept).runs.run_id.tolist() == [sweep.rows[0].run_id]
    monkeypatch.setattr(tempfile, "tempdir", NOWHERE)
    temporary_results.cache_clear()
    sweep.run([simulated(NOWHERE, seed=1)])
    assert sweep.rows[1].status == "crash"
    assert "no folder can be made for it" in sweep.rows[1].reason
    first, second = unwritten_messages(sweep.unwritten)
    assert f"1 run could not be written to {NOWHERE} (No such file or directory); it is kept in {kept} instead" in first
    assert "it is in the table above alone" in second
    assert unwritten_messages([Unwritten(Path("a"), "full", None)] * 2) == [
        "2 runs could not be written to a (full); they are in the table above alone"
    ]


@pytest.fixture
def strangers_leases(temporary: Path) -> Iterator[list[Path]]:
    """Folders among the system's temporary files whose leases are not what a lease is; opening one may wait forever."""
    paths = [temporary / f"zerobench-temp-{number}-0badcafe{LEASE}" for number in range(6)]
    for path in paths:
        path.with_suffix("").mkdir()
    pipe, zero, large, rest = *paths[:3], paths[3:]
    os.mkfifo(pipe)
    zero.symlink_to("/dev/zero")
    large.touch()
    os.truncate(large, 2**40)
    other_duration = b"filelock/2\npid=1\nhost=h\nmode=lease\ntoken=" + b"0" * 32 + b"\nduration=30.0\n"
    contents = (b"\xff\xfe", b"filelock/2\npid=x\nhost=h\nmode=lease\n", other_duration)
    for path, content in zip(rest, contents, strict=True):
        path.write_bytes(content)
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("a lease was waited for"))
    signal.alarm(60)
    yield paths
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_strangers_lease_is_not_waited_for(strangers_leases: list[Path]) -> None:
    with temporary_folder():
        assert all(path.with_suffix("").is_dir() for path in strangers_leases), "whose they are is not known"
    os.utime(strangers_leases[-1], (0, 0))
    with temporary_folder():
        assert not strangers_leases[-1].with_suffix("").exists(), "a silent lease of another duration"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with mounted(tmp_path / "small", "256k") as where:
        yield where


def test_a_full_disk_ends_no_sweep_and_loses_no_row(small_disk: Path, temporary: Path) -> None:
    home, filled = small_disk / "runs", []

    def fill(_news: dict) -> None:
        if not filled:
            filled.append(small_disk / "filled")
            with pytest.raises(OSError, match="No space"):
                filled[0].write_bytes(bytes(2**20))

    sweep = Sweep(MagicMock(progress=fill))
    sweep.run([simulated(home), simulated(home, seed=1)])
    assert [row.status for row in sweep.rows] == ["ok", "ok"], [row.reason for row in sweep.rows]
    (kept,) = {one.kept for one in sweep.unwritten}
    assert kept.parent == temporary
    assert set(zerobench.load(kept).runs.run_id) == {row.run_id for row in sweep.rows}
    assert "No space left on device" in unwritten_messages(sweep.unwritten)[0]
    assert list(home.glob(".partial-*")) == [], "what was begun there goes"


@pytest.mark.thorough
def test_a_read_only_folder_is_refused_unless_all_is_there(small_disk: Path, monkeypatch, capsys) -> None:
    words = ["world_size=2", "backend=simulated", "model=gpt_tiny", "model.layers=1", "measure=quick", "device=cpu"]
    monkeypatch.chdir(small_disk)
    assert cli.run(words) == 0
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert cli.run(words) == 0, "reused"
    capsys.readouterr()
    assert cli.run([*words, "seed=1"]) == 2
    assert "results_dir=results/runs: it cannot be written to (Read-only file system); name another folder" in (
        capsys.readouterr().err
    )
    for verb in (["status"], ["export"], ["prune", "--yes"]):
        assert cli.run(verb) == 0
    run = next(Path("results/runs").glob("[!.]*")).name
    for verb in (["export", "--out", "there.csv"], ["budget", "record", "--runs", "results/runs"]):
        assert cli.run(verb) == 2
        assert "Read-only file system" in capsys.readouterr().err
    for verb in (["export", "--format", "parquet", "--out", "x"], ["compare", run, run, "--out", "there.md"]):
        assert cli.run([word.replace(run, f"results/runs/{run}") for word in verb]) == 2
        assert "Read-only file system" in capsys.readouterr().err
    monkeypatch.chdir("/")


def hold(folder: Path, name: str, to_test: Connection) -> None:
    with folders.turn(folder, name):
        to_test.send("held")
        to_test.recv()


def test_two_sweeps_do_not_measure_one_launch_twice(tmp_path: Path) -> None:
    """Another process has its turn: we wait, and take what it found. A launch of its own we do not wait for."""
    one, runs = simulated(tmp_path), []
    here, there = fork_server.context().Pipe()
    other = fork_server.context().Process(target=hold, args=(tmp_path, f"{run_prefix(one)} 0", there), daemon=True)
    other.start()
    there.close()
    assert here.recv() == "held"
    second = replace(one, repeat=1)
    row, reused = find_or_run(second, lambda _: None, on_wait=lambda _: runs.append("waited"))
    assert (row.status, reused, runs) == ("ok", False, [])
    said: list[bool] = []

    def finish(waits: bool) -> None:
        said.append(waits)
        if waits:
            runs.append(make(tmp_path, "zero2").rename(tmp_path / f"{run_prefix(one)}-9"))
            here.send("end")
            other.join(60)

    row, reused = find_or_run(one, lambda _: None, on_wait=finish)
    assert reused
    assert len(runs) == 1
    assert said == [True, False], "the wait has an end"
    assert find_or_run(one, lambda _: None)[1], "and no lock is left"


def test_a_run_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch) -> None:
    done: list[tuple[str, str]] = []
    sync, rename = files.sync, Path.rename
    for module in (files, folders):
        monkeypatch.setattr(module, "sync", lambda path: (done.append(("sync", path.name)), sync(path)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append(("rename", Path(to).name)), rename(path, to))[1])
    run = make(tmp_path, "zero2")
    named = done.index(("rename", run.name))
    assert {("sync", path.name) for path in run.iterdir()} <= set(done[:named])
    assert done[named - 1][1].startswith(".partial-"), "the names in its folder"
    assert done[named + 1 :] == [("sync", tmp_path.name)]
    done.clear()
    folders.amend_row(run, {"peak_bytes": 3})
    assert [what for what, _ in done] == ["sync", "sync"]


def test_what_killed_sweeps_left_goes_when_the_next_begins_even_where_it_reuses_all(
    tmp_path: Path, temporary: Path
) -> None:
    """A folder that a living process may just be making stays: without a lock it is abandoned after an hour only. A
    user's, whose name ends in no number as ours do, stays for good.
    """
    one = simulated(tmp_path)
    jobs, old, new = (tmp_path / name for name in (".jobs-1-0badcafe", ".pruned-0badcafe", ".pruned-1badcafe"))
    users = [tmp_path / f"{prefix}mine" for prefix in (".jobs-", ".pruned-", ".partial-", ".turn-")]
    users += [tmp_path / "searches/.gitkeep", temporary / "zerobench-temp-mine"]
    for folder in (jobs, old, new, tmp_path / ".references/.partial-ddp-0badcafe", *users):
        folder.mkdir(parents=True)
        (folder / "half").touch()
    for folder in (old, *users):
        os.utime(folder, (0, 0))
    check_folders([one])
    with temporary_folder():
        assert all(one.exists() for one in users)
    assert {path.name for path in {*tmp_path.iterdir()} - {*users, temporary}} == {new.name, ".references", "searches"}
    assert not list((tmp_path / ".references").iterdir())
