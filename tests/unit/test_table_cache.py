"""The cache of a large results folder: what `load` gives is the same with it, without it, and when it is spoilt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.unit.test_status_show_prune import make
from zerobench.results import table_cache
from zerobench.results.tables import ALL_TABLES, OPTIONAL, load

RUNS = 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results folder that is just large enough for a cache."""
    for name in ("WORTH", "RENEWED_AFTER"):
        monkeypatch.setattr(table_cache, name, RUNS)
    for repeat in range(RUNS):
        make(tmp_path, repeat=repeat)
    return tmp_path


def same(one: object, other: object) -> None:
    for name in ALL_TABLES:
        pd.testing.assert_frame_equal(getattr(one, name), getattr(other, name))


def files_read(monkeypatch: pytest.MonkeyPatch, where: Path) -> int:
    """How many parquet files `load` opens."""
    opened: list[object] = []
    with monkeypatch.context() as patch:
        real = pq.ParquetFile
        patch.setattr(
            "zerobench.results.frames.pq.ParquetFile", lambda path, **more: opened.append(path) or real(path, **more)
        )
        load(where)
    return len(opened)


def test_a_second_load_reads_few_files_and_gives_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(folder)
    assert len(first.runs) == RUNS
    assert files_read(monkeypatch, folder) == len(ALL_TABLES) - len(OPTIONAL)
    same(load(folder), first)


def test_runs_that_changed_came_or_went_are_seen(folder: Path) -> None:
    load(folder)
    runs = sorted(path for path in folder.iterdir() if (path / "run.json").is_file())
    row = json.loads((runs[0] / "run.json").read_text())
    (runs[0] / "run.json").write_text(json.dumps(row | {"status": "crash"}))
    shutil.rmtree(runs[1])
    make(folder, repeat=RUNS)
    now = load(folder)
    shutil.rmtree(next(folder.glob(f"{table_cache.PREFIX}*")))
    same(now, load(folder))
    assert len(now.runs) == RUNS
    assert list(now.runs.status[now.runs.run_id == runs[0].name]) == ["crash"]


@pytest.mark.parametrize("name", ["index.json", "steps.parquet", "runs.parquet"])
def test_a_damaged_cache_is_not_believed(name: str, folder: Path) -> None:
    first = load(folder)
    (next(folder.glob(f"{table_cache.PREFIX}*")) / name).write_bytes(b"[1]")
    same(load(folder), first)


@pytest.mark.parametrize("name", ["memory.parquet", "runs.parquet"])
def test_a_cache_without_a_table_is_not_believed(name: str, folder: Path) -> None:
    whole = load(folder)
    [kept] = folder.glob(f"{table_cache.PREFIX}*")
    (kept / name).unlink()
    same(load(folder), whole)


def test_a_folder_that_cannot_be_written_to_has_no_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        assert len(load(folder).runs) == RUNS
    assert not list(folder.glob(".tables*"))
