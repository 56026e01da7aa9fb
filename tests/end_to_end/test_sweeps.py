"""A sweep on its users' worst day: failing, run again, watched, looked after; kills: faults/test_instants.py.

What a sweep must keep: a launch that has its row is never lost nor measured twice, and nothing half done is seen.
"""

import re
from pathlib import Path

import pytest

import zerobench
from tests.end_to_end.command import SMALL
from zerobench import cli
from zerobench.predict import estimate
from zerobench.results.tables import run_folders

RUNS = Path("results/runs")
ONE = ["world_size=1", *SMALL]
"""The cheapest cell."""


def finished(where: Path) -> list[str]:
    return [folder.name for folder in run_folders(where)] if where.is_dir() else []


def tree(where: Path) -> dict[str, int]:
    """Every file and folder with when it was last written."""
    return {str(p.relative_to(where)): p.stat().st_mtime_ns for p in where.rglob("*")}


def test_repeats_are_rounds_and_a_failed_cell_is_not_repeated(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["-m", "seed=0,1", *ONE, "model.heads=2,5", "measure.repeats=2"]) == 1
    runs = zerobench.load(RUNS).runs.sort_values("started")
    assert set(runs.status) == {"ok"}
    assert list(zip(runs.seed, runs.repeat, strict=True)) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    shown = capsys.readouterr()
    assert "ok ×2" in shown.out
    assert shown.err.count("invalid: model.heads=5") == 2, "launched once each, for their rows"


@pytest.mark.thorough
def test_a_failed_cell_runs_again_and_the_verbs_look_after_what_is_left(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["launch.timeout_s=0.05", *ONE]) == 1
    assert cli.run(["status"]) == 0
    assert "`zerobench prune` removes it" in capsys.readouterr().out
    failed = zerobench.load(RUNS).runs.run_id[0]
    assert cli.run(["show", failed]) == 0
    assert ": timeout: " in capsys.readouterr().out
    for arguments, count in ((ONE, 2), (ONE, 2), ([*ONE, "rerun=true"], 3)):
        assert cli.run(arguments) == 0
        assert len(finished(RUNS)) == count
    runs = zerobench.load(RUNS).runs
    assert list(runs.status) == ["timeout", "ok", "ok"]
    assert runs.cell_id.nunique() == 1

    capsys.readouterr()
    assert cli.run(["status"]) == 0
    assert "3 runs of 1 cell: 2 ok, 1 timeout; 2 superseded" in capsys.readouterr().out
    assert cli.run(["prune", "--yes"]) == 0
    assert finished(RUNS) == [runs.run_id[2]]
    before = tree(RUNS)
    assert cli.run(ONE) == 0
    assert tree(RUNS) == before, "what prune leaves is reused"
    capsys.readouterr()
    assert cli.run(["show", "ddp"]) == 0
    shown = capsys.readouterr().out
    for words in ("Memory in a step, rank 0", "Largest tensors", "Traffic", "the losses of all passes agree"):
        assert words in shown


def test_a_dry_run_tells_what_would_be_done_and_writes_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["--dry-run", "-m", "strategy=ddp,zero3", *ONE]) == 0
    assert "2 cells: 2 to run; nothing was started" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert cli.run(["seed=0", *ONE]) == 0
    before = tree(tmp_path)
    capsys.readouterr()
    assert cli.run(["-m", "seed=0,1", *ONE, "model.heads=2,5", "--dry-run"]) == 1
    shown = capsys.readouterr().out
    plans = re.findall(r"heads=(\d) seed=(\d) +(\w+)", shown)
    assert plans == [("2", "0", "reuse"), ("5", "0", "refuse"), ("2", "1", "run"), ("5", "1", "refuse")]
    assert "4 cells: 1 to run, 1 to reuse, 2 to refuse; nothing was started" in shown
    assert "model.heads=5: it must divide hidden=16" in shown
    assert re.findall(r"(reuse|run) .* (< 1 %)  ", shown) == [("reuse", "< 1 %"), ("run", "< 1 %")], "of memory"
    assert tree(tmp_path) == before


def test_what_does_not_fit_is_refused_unless_it_is_to_run_anyway(tmp_path: Path, monkeypatch, capsys) -> None:
    """The model of these cells is built without memory: it is larger than that of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(estimate, "machine_bytes", lambda: 23 * 2**30)
    words = ["model=gpt_7b", "world_size=2", "strategy=ddp", "device=cpu"]
    why = "model=gpt_7b: its states need 101.40 GiB per rank, 202.80 GiB for 2 ranks, and this machine has 23.00 GiB"
    anyway = "launch.check_memory=false"
    assert cli.run(words) == 2
    assert capsys.readouterr().err == f"zerobench: {why}; {anyway} runs it all the same\n"
    assert cli.run([*words, "--dry-run"]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"refuse .* 101.40 GiB +882 %", shown)
    assert f"{why}; {anyway}" in shown
    assert cli.run([*words, anyway, "--dry-run"]) == 0
    assert re.search(r"run .* 101.40 GiB +882 %", capsys.readouterr().out)
    assert not list(tmp_path.iterdir())
