"""Questions of prune before it removes, and folders that it does not touch."""

from __future__ import annotations

from pathlib import Path

from tests.unit.test_status_show_prune import make, prune
from zerobench.commands.prune import Doomed, remove
from zerobench.results.folders import claim_folder
from zerobench.results.tables import collect, load


def test_prune_asks_on_a_terminal_and_leaves_what_changed_meanwhile(tmp_path: Path, monkeypatch, capsys) -> None:
    failed = make(tmp_path, status="crash")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "")
    assert prune(tmp_path) == 0
    assert failed.is_dir()

    def replace(_question: str) -> str:
        failed.rename(tmp_path / "aside")
        (tmp_path / "aside").rename(tmp_path.parent / f"{tmp_path.name}-moved")
        make(tmp_path).rename(failed)  # an older version gave the name again
        return "y"

    monkeypatch.setattr("builtins.input", replace)
    assert prune(tmp_path) == 0
    assert "removed 0 of 1" in capsys.readouterr().out
    assert list(load(tmp_path).runs.status) == ["ok"]


def test_prune_refuses_collections_and_single_runs(tmp_path: Path, capsys) -> None:
    run = make(tmp_path / "runs", status="crash")
    collect(load(tmp_path / "runs"), tmp_path / "collection")
    assert prune(tmp_path / "collection", "--yes") == 2
    assert "nothing to prune" in capsys.readouterr().err
    assert prune(run, "--yes") == 2
    assert "is one run" in capsys.readouterr().err
    assert prune(tmp_path / "nowhere") == 2
    assert (tmp_path / "collection/runs.parquet").is_file()
    assert run.is_dir()


def test_prune_leaves_a_folder_that_a_sweep_has_claimed_meanwhile(tmp_path: Path) -> None:
    aside = claim_folder(tmp_path, "zero1-tiny-n2")
    try:
        one = Doomed(aside.path, "left by a dead process", 0, aside.path.stat().st_mtime_ns)
        assert not remove(one)
        assert aside.path.is_dir()
    finally:
        aside.release()
