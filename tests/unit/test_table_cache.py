"""The cache of a large results folder: what `load` gives is the same with it, without it, and when it is spoilt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.unit.test_status_show_prune import make
from zerobench.results import run_files
from zerobench.results.tables import ALL_TABLES, Results, load

pytestmark = pytest.mark.slow

RUNS = 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results folder that is just large enough for a cache."""
    for name in ("WORTH", "RENEWED_AFTER"):
        monkeypatch.setattr(run_files, name, RUNS)
    for repeat in range(RUNS):
        make(tmp_path, repeat=repeat)
    return tmp_path


def same(one: object, other: object) -> None:
    for name in ALL_TABLES:
        pd.testing.assert_frame_equal(getattr(one, name), getattr(other, name))


def whole(where: Path) -> Results:
    """The folder's results, each table of which has been read."""
    found = load(where)
    for name in ALL_TABLES:
        getattr(found, name)
    return found


def files_read(monkeypatch: pytest.MonkeyPatch, where: Path) -> int:
    """How many parquet files `load` opens."""
    opened: list[object] = []
    with monkeypatch.context() as patch:
        real = pq.ParquetFile
        patch.setattr(
            "zerobench.results.frames.pq.ParquetFile", lambda path, **more: opened.append(path) or real(path, **more)
        )
        found = load(where)
        assert len(opened) <= 1, "rows alone, or nothing but their cache"
        for name in ALL_TABLES:
            getattr(found, name)
    return len(opened)


def test_a_second_load_reads_few_files_and_gives_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = whole(folder)
    assert len(first.runs) == RUNS
    assert files_read(monkeypatch, folder) == len(ALL_TABLES) - len({"searches"})
    same(load(folder), first)


def test_runs_that_changed_came_or_went_are_seen(folder: Path) -> None:
    whole(folder)
    runs = sorted(path for path in folder.iterdir() if (path / "run.json").is_file())
    row = json.loads((runs[0] / "run.json").read_text())
    (runs[0] / "run.json").write_text(json.dumps(row | {"status": "crash"}))
    shutil.rmtree(runs[1])
    make(folder, repeat=RUNS)
    now = load(folder)
    whole(folder)
    for kept in folder.glob(f"{run_files.PREFIX}*"):
        shutil.rmtree(kept)
    same(now, load(folder))
    assert len(now.runs) == RUNS
    assert list(now.runs.status[now.runs.run_id == runs[0].name]) == ["crash"]


def test_rows_of_a_run_that_was_damaged_or_removed_are_left_out_with_a_sentence(folder: Path) -> None:
    """A table of many runs is read when it is used, and its pages are checked then."""
    first, second, *_ = sorted(path for path in folder.iterdir() if (path / "run.json").is_file())
    content = bytearray((first / "memory.parquet").read_bytes())
    content[40] ^= 1
    (first / "memory.parquet").write_bytes(content)
    found = load(folder)
    shutil.rmtree(second)
    with pytest.warns(UserWarning, match="rows of memory are left out") as caught:
        left = set(found.runs.run_id) - set(found.memory.run_id)
    assert left == {first.name, second.name}
    told = sorted(str(one.message) for one in caught)
    assert [first.name in told[0], second.name in told[1]] == [True, True]
    assert "the run was removed meanwhile" in told[1]
    with pytest.warns(UserWarning, match=first.name):
        assert first.name not in set(load(folder).memory.run_id), "no cache keeps it silent"


@pytest.mark.shown(2)
@pytest.mark.parametrize("content", [b"[1]", None])
@pytest.mark.parametrize("name", ["index.json", "memory.parquet", "runs.parquet"])
def test_a_damaged_cache_or_one_without_a_table_is_not_believed(name: str, content: bytes | None, folder: Path) -> None:
    first = whole(folder)
    table = "memory" if name == "index.json" else name.partition(".")[0]
    kept = next(folder.glob(f"{run_files.PREFIX}{table}-*")) / name
    kept.write_bytes(content) if content else kept.unlink()
    same(load(folder), first)


def test_a_folder_that_cannot_be_written_to_has_no_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        assert len(whole(folder).runs) == RUNS
    assert not list(folder.glob(".tables*"))
