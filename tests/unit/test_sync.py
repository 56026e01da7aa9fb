"""`zerobench sync`: results folders are merged by content; nothing is lost, doubled or half written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest

import zerobench
from tests.unit.test_status_show_prune import make
from zerobench import cli
from zerobench.commands.sync import merge
from zerobench.commands.sync.command import _tell_of_wait
from zerobench.commands.sync.contents import files_of
from zerobench.records import SearchRow
from zerobench.results.folders import claim_folder, write_search
from zerobench.results.tables import collect


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two clusters' results: b has an equal copy of a's first run, and another run of the name of a's second."""
    a, b = tmp_path / "a", tmp_path / "b"
    first = make(a, "zero1", logs={"timed/rank-0.log": "said"})
    shutil.copytree(first, b / first.name)
    make(a, "zero2", peak_bytes=7)
    make(b, "zero2", peak_bytes=8)
    make(a, "zero3")
    return a, b


def search(run_ids: str, search_id: str = "feed", **more: object) -> SearchRow:
    """A result of a search."""
    known = {"strategy": "zero2", "model": "tiny", "world_size": 2, "batch": 8, "sequence": 16, "device": "cpu"}
    more = {"limit_bytes": 2**30, "status": "found", "reason": "", "tried": 3, "least_bytes": 7, **more}
    return SearchRow(search_id=search_id, run_ids=run_ids, **known, **more)  # type: ignore[arg-type]


def all_of(where: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(where)): path.read_bytes() for path in where.rglob("*") if path.is_file()}


def sync(*words: object) -> int:
    return cli.run(["sync", *map(str, words)])


def test_what_is_missing_comes_once_and_equal_names_of_others_are_renamed(folders, capsys) -> None:
    a, b = folders
    here = all_of(a)
    zero2 = next(a.glob("zero2-*")).name
    write_search(a, search(zero2))
    assert sync(a, b) == 0
    said = capsys.readouterr().out
    assert f"{a} -> {b}: 2 runs, 1 search copied, 1 of them under another name; 1 there already" in said
    assert f"{zero2[:-1]}2" in said
    runs = zerobench.load(b).runs.set_index("run_id")
    assert len(runs) == 4
    assert runs.peak_bytes[[zero2, f"{zero2[:-1]}2"]].tolist() == [8, 7]
    assert set(runs.index) == {path.name for path in b.iterdir()} - {"searches"}
    assert zerobench.load(b).memory.run_id.nunique() == 4
    assert zerobench.load(b).searches.run_ids.tolist() == [f"{zero2[:-1]}2"], "a search names the run as it is called"
    assert {name: text for name, text in all_of(a).items() if not name.startswith("searches")} == here
    before = all_of(b)
    assert sync(a, b) == 0
    assert f"{a} -> {b}: nothing copied; 4 there already" in capsys.readouterr().out
    assert all_of(b) == before, "a second time changes nothing"
    assert list(b.glob(".*")) == []


def test_both_directions_end_with_the_same_runs(folders, tmp_path: Path, capsys) -> None:
    a, b = folders
    assert sync("--both", a, b) == 0
    one, other = (zerobench.load(where).runs.drop(columns="run_id").astype(str) for where in (a, b))
    assert sorted(map(tuple, one.to_numpy())) == sorted(map(tuple, other.to_numpy()))
    assert len(one) == 4
    assert sync("--both", a, b) == 0
    assert capsys.readouterr().out.count("nothing copied; 4 there already") == 2
    assert sync(a, b, tmp_path / "third") == 0, "two into a third"
    assert len(list((tmp_path / "third").iterdir())) == 4


def test_runs_are_equal_only_with_all_their_files(folders, capsys) -> None:
    a, b = folders
    (log,) = b.rglob("rank-0.log")
    log.write_text("sbid")
    assert sync(a, b) == 0
    assert "3 runs copied, 2 of them under another name" in capsys.readouterr().out


def test_a_dry_run_says_what_a_merge_then_does(folders, capsys) -> None:
    a, b = folders
    before = all_of(b)
    assert sync(a, b, "--dry-run") == 0
    said = capsys.readouterr().out
    zero2 = next(a.glob("zero2-*")).name
    assert [line.split() for line in said.splitlines() if zero2 in line] == [["run", zero2, f"{zero2[:-1]}2"]]
    assert "2 runs to copy, 1 of them under another name; 1 there already" in said
    assert all_of(b) == before


def test_what_is_unfinished_damaged_or_no_run_stays_behind(folders, tmp_path: Path, capsys) -> None:
    a, b = folders
    writing = claim_folder(a, "zero1-tiny-n2")
    run = next(a.glob("zero3-*"))
    (run / "memory.parquet").write_bytes(b"PAR1")
    (run / "outside").symlink_to("/etc/passwd")
    crashed = make(a, "ddp")
    (crashed / "run.json").write_bytes(b"")  # as a machine leaves it that loses its power
    (a / "notes.txt").write_text("mine")
    linked = next(a.glob("zero2-*"))
    (linked / "outside").symlink_to("/etc/passwd")
    assert sync(a, b) == 1
    said = capsys.readouterr().out
    assert f"left out: run {run.name}: " in said
    assert f"left out: run {crashed.name}: " in said
    assert "1 run copied, 1 of them under another name; 1 there already; 2 left out; 1 run in it not finished" in said
    assert not list(b.rglob("outside"))
    assert not list(b.glob("zero3-*"))
    assert not (b / "notes.txt").exists()
    writing.release()


def test_a_collection_brings_what_is_missing_under_new_names_in_every_table(folders, tmp_path: Path) -> None:
    a, b = folders
    zero2 = next(a.glob("zero2-*")).name
    write_search(a, search(zero2))
    collect(zerobench.load(a), tmp_path / "x" / "kept")
    assert sync(tmp_path / "x", b) == 0
    both = zerobench.load(b)
    assert len(both.runs) == 4
    assert not both.runs.run_id.duplicated().any()
    renamed = f"{zero2[:-1]}2"
    assert both.runs.set_index("run_id").peak_bytes[renamed] == 7
    for table in (both.memory, both.traffic, both.tensors):
        assert set(table.run_id) == set(both.runs.run_id)
    assert both.searches.run_ids.tolist() == [renamed]
    before = all_of(b)
    assert sync(tmp_path / "x", a, b) == 0, "and its runs are known as those of a's folders"
    assert all_of(b) == before


def test_a_merge_that_is_interrupted_leaves_whole_runs_and_goes_on(folders, capsys) -> None:
    a, b = folders
    copy, left = merge.shutil.copy2, [12]

    def stop(source: Path, target: Path) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        copy(source, target)

    with patch.object(merge.shutil, "copy2", stop):
        assert sync(a, b) == 130
    assert "1 run copied, 1 of them under another name; 1 there already; interrupted" in capsys.readouterr().out
    assert len(zerobench.load(b).runs) == 3
    assert list(b.glob(".*")) == []
    assert sync(a, b) == 0
    assert "1 run copied; 2 there already" in capsys.readouterr().out
    for run in a.iterdir():
        assert any({p: (run / p).read_bytes() for p in files_of(run) if p.name != "run.json"}
                   == {p: (other / p).read_bytes() for p in files_of(other) if p.name != "run.json"}
                   for other in b.iterdir())  # fmt: skip


def test_a_full_disk_leaves_nothing_half_written(folders, capsys) -> None:
    a, b = folders
    before = {path.name for path in b.iterdir()}
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with patch.object(merge.shutil, "copy2", side_effect=full):
        assert sync(a, b) == 1
    said = capsys.readouterr().out
    assert said.count("No space left on device") == 2
    assert "nothing copied; 1 there already; 2 left out" in said
    assert {path.name for path in b.iterdir()} == before


def test_the_same_search_with_another_result_is_kept_beside_the_first(folders) -> None:
    a, b = folders
    write_search(a, search("", tried=4))
    write_search(b, search("", tried=5))
    assert sync(a, b) == sync(a, b) == 0
    found = zerobench.load(b).searches.set_index("search_id")
    assert found.tried.to_dict() == {"feed": 5, "feed-2": 4}


def test_what_cannot_be_merged_is_one_sentence(folders, tmp_path: Path, capsys) -> None:
    a, b = folders
    run, file, outer = next(a.iterdir()), tmp_path / "file", tmp_path
    file.write_text("")
    for words, told in {
        (tmp_path / "none", b): "none: there is no such results folder",
        ("host:/runs", b): "host:/runs: there is no such folder; a folder of another machine is copied (rsync -a)",
        (a, a / ".." / "a"): "are one folder",
        (a, file): "file: it is no folder",
        (a, run): f"{run} is one run; name the results folder that it is in",
        (outer, b): f"{outer} holds no run, collection or search; a, b in it does",
        (a, "/proc/none"): "/proc/none: it cannot be written to",
    }.items():
        assert sync(*words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("zerobench sync: ")
        assert told in line
    assert {json.loads((one / "run.json").read_text())["run_id"] for one in a.iterdir()} == {
        p.name for p in a.iterdir()
    }


def test_a_wait_for_another_merge_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for waits in (True, False):
        _tell_of_wait(tmp_path, waits)
    assert capsys.readouterr().err.count("another process merges into") == 1
