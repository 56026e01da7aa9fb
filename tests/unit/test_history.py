"""`zerobench history`: entries in git's order, steps to the byte, gaps, failures; a branch without a checkout."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import toy_repository as toy
from tests.cells import cell
from tests.made_up import run as made_up_run
from zerobench import cli
from zerobench.records import LineRow
from zerobench.results.folders import claim_folder, write_run
from zerobench.results.tables import load

PEAKS = [100, 100, 164, 164, 164, 150]
"""Peaks of the commits, MiB; the fourth is not measured, and the fifth fails."""

MIB = 2**20


def measured(runs: Path, *strategies: str, status: str = "ok", line: str = "train.py:3 in f", **values: Any) -> Path:
    """A results folder with a made-up run per strategy."""
    for strategy in strategies:
        row = made_up_run(strategy, 1, status, **values)
        row.reason = "" if status == "ok" else "out of memory in backward"
        tables = {"lines": [LineRow(0, "peak", "activations", "net", line, values.get("peak_bytes", 0), 1, "h")]}
        write_run(claim_folder(runs, strategy), strategy, row, cell(strategy, 1).config, {}, tables)
    return runs


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A repository, in which commands run, with a history of all commits but the fourth; their hashes."""
    hashes = toy.repository(tmp_path / "r", [{"n": str(n)} for n in range(len(PEAKS))])
    monkeypatch.chdir(tmp_path / "r")
    for n in (5, 0, 2, 1, 4):  # as jobs end, not as commits follow
        status = "ok" if n != 4 else "oom"
        runs = measured(Path(f"runs{n}"), "ddp", status=status, peak_bytes=PEAKS[n] * MIB, growth_bytes=0)
        assert cli.run(["history", "add", "--runs", str(runs), "--commit", hashes[n]]) == 0
    return hashes


def test_steps_gaps_and_failures_stand_in_the_order_of_the_commits(place: list[str], capsys) -> None:
    capsys.readouterr()
    assert cli.run(["history", "--metric", "peak_bytes"]) == 0
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if re.match(r"\s+([0-9a-f]{10}|…) ", line)]
    assert [re.split(r"\s{2,}", line.strip()) for line in lines] == [
        [place[0][:10], "2001-09-09", "change 0", "104,857,600"],
        [place[1][:10], "2001-09-09", "change 1", "104,857,600"],
        [place[2][:10], "2001-09-09", "change 2", "171,966,464", "+64.0 MiB (+64.00 %)"],
        ["…", "1 commit not measured"],
        [place[4][:10], "2001-09-09", "change 4", "oom: out of memory in backward"],
        [place[5][:10], "2001-09-09", "change 5", "157,286,400", "−14.0 MiB (-8.54 %), by it or the 2 before it"],
        [place[2][:10], "train.py:3 in f: +64.0 MiB (net, h)"],
        [place[5][:10], "train.py:3 in f: −14.0 MiB (net, h)"],
    ]
    assert shown.endswith("5 commits, 1 series: 2 steps; 0 series did not move\n")

    assert cli.run(["history", "--metric", "peak_bytes", "--last", "2", "--format", "json"]) == 0
    (series,) = json.loads(capsys.readouterr().out)["series"]
    assert [(one["commit"], one["status"], one["value"], one["step"]) for one in series["points"]] == [
        (place[4], "oom", None, None), (place[5], "ok", PEAKS[5] * MIB, None),
    ]  # fmt: skip
    assert cli.run(["history", "--metric", "peak_bytes", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(one["commit"], one["step"], one["not_measured_before"]) for one in rows] == [
        (place[n], step, gap)
        for n, step, gap in ((0, "", ""), (1, "", "0"), (2, str(64 * MIB), "0"), (4, "", "1"), (5, str(-14 * MIB), "0"))
    ]


def test_a_page_has_its_figures_and_the_steps(place: list[str], capsys) -> None:
    assert cli.run(["history", "--out", "out/page.html", "--figures", "out"]) == 0
    page = Path("out/page.html").read_text()
    assert page.count("<svg") == 4, "peak, growth, states and volume"
    assert page.count('<tr class="step">') == 2 * 2, "among all steps, and in the table of its series"
    assert page.count('<tr class="failed">') == 4
    assert not re.search(r"(src|href)=\"http|<script", page), "one file"
    assert f"<td>{place[2][:10]}</td>" in page
    assert {one.name for one in Path("out").glob("peak_bytes.*")} == {"peak_bytes.png", "peak_bytes.svg"}
    assert cli.run(["history", "--steps", "--out", "out/page.md", "--metric", "peak_bytes,step_s"]) == 0
    text = Path("out/page.md").read_text()
    assert "![peak_bytes over commits](page_figures/peak_bytes.png)" in text
    assert Path("out/page_figures/peak_bytes.png").is_file()
    assert f"| {place[2][:10]} | 2001-09-09 | change 2 | **171,966,464** | **+64.0 MiB" in text
    assert f"| {place[1][:10]} |" not in text.partition("### ")[2].partition("## step_s")[0], "nothing moved there"
    assert "it does not repeat exactly, so no steps are marked" in text


def test_a_step_behind_a_gap_and_another_torch_is_told_as_such(tmp_path: Path, monkeypatch, capsys) -> None:
    hashes = toy.repository(tmp_path / "r", [{"n": str(n)} for n in range(4)])
    monkeypatch.chdir(tmp_path / "r")
    for n, torch in ((0, "2.12.1+cpu"), (3, "2.13.0+cpu")):
        runs = measured(Path(f"runs{n}"), "ddp", peak_bytes=(1 + n) * MIB, torch_version=torch)
        assert cli.run(["history", "add", "there", "--runs", str(runs), "--commit", hashes[n]]) == 0
    assert cli.run(["history", "there", "--metric", "peak_bytes", "--format", "markdown"]) == 0
    words = "+3.0 MiB (+300.00 %), by it or the 2 before it, torch 2.12 → 2.13"
    assert words in capsys.readouterr().out


def test_a_branch_is_written_and_read_without_a_checkout(place: list[str], capsys) -> None:
    toy.git(Path(), "add", "runs0/.")
    before = toy.git(Path(), "status", "--porcelain"), toy.git(Path(), "rev-parse", "HEAD")
    add = ["history", "add", "--branch", "metrics", "--path", "figures/cpu"]
    for n in (2, 1, 5):
        assert cli.run([*add, "--runs", f"runs{n}", "--commit", place[n]]) == 0
    assert toy.git(Path(), "log", "--format=%s", "metrics").splitlines() == [
        f"Figures of {place[n][:10]}: change {n}" for n in (5, 1, 2)
    ]
    assert len(toy.git(Path(), "ls-tree", "--name-only", "metrics", "figures/cpu/").splitlines()) == 3
    assert (toy.git(Path(), "status", "--porcelain"), toy.git(Path(), "rev-parse", "HEAD")) == before
    capsys.readouterr()
    assert cli.run(["history", "--branch", "metrics", "--path", "figures/cpu", "--metric", "peak_bytes"]) == 0
    shown = capsys.readouterr().out
    assert "+64.0 MiB" in shown
    assert "2 commits not measured" in shown
    assert "3 commits, 1 series: 2 steps" in shown

    more = measured(Path("more"), "zero1", peak_bytes=MIB)
    assert cli.run([*add, "--runs", str(more), "--commit", place[5]]) == 0, "another job of the same commit"
    assert cli.run(["history", "--branch", "metrics", "--path", "figures/cpu", "--where", "strategy=zero1"]) == 0
    assert "peak_bytes, zero1 tiny N=1 b=2: 1,048,576 at 1 commit\n" in capsys.readouterr().out


def test_a_commit_that_is_added_again_keeps_its_other_cells(place: list[str]) -> None:
    entry = Path("results/history") / place[0][:12]
    again = measured(Path("again"), "ddp", "zero1", peak_bytes=7 * MIB)
    assert cli.run(["history", "add", "--runs", str(again), "--commit", place[0]]) == 0
    assert dict(zip(load(entry).runs.strategy, load(entry).runs.peak_bytes, strict=True)) == {
        "ddp": 7 * MIB, "zero1": 7 * MIB,
    }  # fmt: skip
    third = measured(Path("third"), "zero1", peak_bytes=9 * MIB)
    assert cli.run(["history", "add", "--runs", str(third), "--commit", place[0]]) == 0
    assert dict(zip(load(entry).runs.strategy, load(entry).runs.peak_bytes, strict=True)) == {
        "ddp": 7 * MIB, "zero1": 9 * MIB,
    }  # fmt: skip
    assert not [one for one in Path("results/history").iterdir() if one.name.startswith(".")]


def test_collections_alone_are_a_history_by_their_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    """Outside of a repository the dates decide, and a note says so."""
    monkeypatch.chdir(tmp_path)
    for n, (name, size) in enumerate((("nightly-b", 2), ("nightly-a", 1))):
        started = f"2026-01-0{2 - n}T00:00:00.000+00:00"
        runs = measured(tmp_path / name, "ddp", peak_bytes=size * MIB, commit=None, started=started)
        assert len(load(runs).runs) == 1
    assert cli.run(["history", str(tmp_path), "--metric", "peak_bytes"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("nightly-a") < shown.index("nightly-b")
    assert "+1.0 MiB (+100.00 %)" in shown
    assert "outside of the commits' repository: in the order of their dates" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere: there is no such folder; zerobench history add makes one"),
        (["empty"], "empty: holds no runs; zerobench history add empty --runs RESULTS adds a commit's"),
        (["--metric", "peak_byte"], "--metric peak_byte: no such figure of a run; did you mean peak_bytes?"),
        (["--metric", "mfu"], "no cell has a value of mfu"),
        (["--last", "0"], "--last 0: must be 1 or more"),
        (["--where", "strategy=zero9"], "--where strategy=zero9: no such run; strategy is ddp"),
        (["--branch", "nowhere"], "git says: not a valid object name: nowhere"),
        (["results/history", "--branch", "main"], "results/history: the history is on --branch main; name its folder"),
        (["add", "--runs", "nowhere"], "--runs nowhere: there is no such results folder"),
        (["add", "--runs", "empty"], "--runs empty: holds no runs"),
        (["add", "--runs", "runs0", "--commit", "nowhere"], "nowhere: git says: Needed a single revision"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(
    tmp_path: Path, monkeypatch, capsys, arguments: list[str], words: str
) -> None:
    hashes = toy.repository(tmp_path / "r", [{"n": "0"}])
    monkeypatch.chdir(tmp_path / "r")
    Path("empty").mkdir()
    assert cli.run(["history", "add", "--runs", str(measured(Path("runs0"), "ddp")), "--commit", hashes[0]]) == 0
    capsys.readouterr()
    assert cli.run(["history", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zerobench history")
    assert words in line
