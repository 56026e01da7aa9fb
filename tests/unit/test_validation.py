"""`python -m validation`: every proof explains itself and has its target; kills, and loops under several releases."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tests.cells import cell
from tests.made_up import run as made_up_run
from tests.unit.test_status_show_prune import make
from validation import releases
from validation.__main__ import NAMES, main
from validation.kills import Campaign, digest, judge
from validation.releases import ProgramEnd, Release
from zerobench import cli
from zerobench.results.folders import amend_row, claim_folder, write_run

ROOT = Path(__file__).parents[2]


def test_every_proof_has_a_target_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert main([]) == 0
    listed = capsys.readouterr().out
    for name in NAMES:
        assert f"  {name} " in listed
        assert re.search(rf"^{name}: setup\n(?:\t.*\n)*\t\$\(VALIDATE\) {name} ", makefile, re.MULTILINE), name
        assert f"make {name} " in makefile
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert f"usage: python -m validation {name}" in capsys.readouterr().out
    assert main(["tabel1"]) == 2
    assert capsys.readouterr().err == "validation tabel1: no such proof; did you mean table1?\n"


def test_there_are_at_most_fourteen_verbs() -> None:
    assert len(cli.VERBS) <= 14


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    """A campaign that is done: two launches, of which one was hit before it was finished."""
    made = Campaign(tmp_path, 1, 1.0)
    rows = [json.loads((make(made.calm, name) / "run.json").read_text()) for name in ("ddp", "zero2")]
    shutil.copytree(made.calm, made.killed, dirs_exist_ok=True)
    hit = make(made.killed, "zero2", status="crash", reason="rank 1 was killed", seconds=1.0)
    again = make(made.killed, "zero2")
    shutil.rmtree(made.killed / rows[1]["run_id"])  # else it would have been measured twice
    made.state.calm["two"] = {"code": 0, "launches": [[row["cell_id"], row["repeat"], row["status"]] for row in rows]}
    made.state.seen = {path.name: digest(path) for path in (hit, again)}
    made.state.sent = [(json.loads((hit / "run.json").read_text())["started"], "SIGKILL command")]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("table", ["memory", "traffic", "tensors"])
def test_a_difference_in_a_long_table_alone_is_found(campaign: Campaign, table: str) -> None:
    again = next(name for name in campaign.state.seen if "-2-x" not in name)
    path = campaign.killed / again / f"{table}.parquet"
    rows = parquet.read_table(path)
    parquet.write_table(rows.slice(0, len(rows) - 1), path)
    campaign.state.seen[again] = digest(path.parent)
    assert judge(campaign, 1, ["two"], [])[1] == [f"{again}: {table}: 1 rows are missing, 0 are new"]


@pytest.mark.slow
def test_a_clean_campaign_is_clean_and_each_planted_fault_is_found(campaign: Campaign) -> None:
    row, faults = judge(campaign, 1, ["two"], [])
    assert faults == []
    assert (row.launches, row.signals, row.runs_hit) == (2, 1, 1)
    finished = next(name for name in campaign.state.seen if "-2-x" not in name)
    campaign.state.sent, campaign.state.orphans, campaign.state.hung = [], ["two, start 1: process 7"], ["two, start 2"]
    make(campaign.killed, "ddp")
    (campaign.killed / ".partial-x").mkdir()
    (campaign.work / "tmp/zerobench-tmp-1").mkdir()
    amend_row(campaign.killed / finished, {"peak_bytes": 7})
    row, faults = judge(campaign, 1, ["two"], ["two: ends with 1, the calm one with 0"])
    for words in (
        "ends with 1", "2 finished runs", "is lost, or has changed", "without a signal", "start 2: hung", "process 7",
        "killed/.partial-x is left", "tmp/zerobench-tmp-1 is left", "peak_bytes is 7",
    ):  # fmt: skip
        assert any(words in fault for fault in faults), (words, faults)
    shutil.rmtree(campaign.killed)
    campaign.killed.mkdir()
    make(campaign.killed, "ddp")
    assert any("no run; the calm one is ok" in fault for fault in judge(campaign, 1, ["two"], [])[1])


MIB = 2**20


def made_up(monkeypatch: pytest.MonkeyPatch, by_label: dict[str, dict[str, Any]]) -> None:
    """Has releases leave these figures, a list one per launch, or fail with the words of `says`."""

    launches = itertools.count()

    def measure(release: Release, loops: Sequence[str], world_size: int, runs: Path) -> ProgramEnd:
        values = dict(by_label[release.label])
        if "says" in values:
            return ProgramEnd(1, values["says"])
        for loop in loops:
            number = next(launches)
            mine = {name: one[number % len(one)] if isinstance(one, list) else one for name, one in values.items()}
            row = made_up_run("ddp", world_size, **(mine | {"model": loop}))
            write_run(claim_folder(runs, loop), loop, row, cell("ddp", world_size).config, {}, {})
        return ProgramEnd(0, "")

    monkeypatch.setattr(releases, "measure", measure)


def arguments(labels: Sequence[str], *more: str) -> list[str]:
    """A command line with this Python under several labels."""
    return ["versions", *(f"--python={sys.executable}={label}" for label in labels), *more]


@pytest.mark.thorough
def test_a_value_that_moved_is_marked_at_its_release(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    old = {"peak_bytes": 100 * MIB, "volume_psi": 2.0, "torch_version": "2.12.1"}
    made_up(monkeypatch, {
        "torch 2.11": {"says": "ImportError: no module"},
        "torch 2.12": old,
        "torch 2.13": old | {"peak_bytes": 134 * MIB, "torch_version": "2.13.0"},
        "nightly": old | {"peak_bytes": 134 * MIB, "volume_psi": 3.0, "torch_version": "2.14.0"},
    })  # fmt: skip
    labels = ["torch 2.11", "torch 2.12", "torch 2.13", "nightly"]
    assert main(arguments(labels, "--loops", "ddp,fsdp2")) == 1
    text = capsys.readouterr().out
    titles = "| | torch 2.11 | torch 2.12, torch 2.12.1 | torch 2.13, torch 2.13.0 | nightly, torch 2.14.0 |"
    assert text.count(titles) == 2
    assert text.count("| peak_bytes | – | 104,857,600 | **140,509,184 (+34.0 MiB)** | 140,509,184 |") == 2
    for loop in ("ddp", "fsdp2"):
        assert f"torch 2.11, {loop}: ImportError: no module" in text
    assert main(arguments(labels[1:], "--loops", "ddp")) == 0
    told = capsys.readouterr()
    text = told.out
    assert "| peak_bytes | 104,857,600 | **140,509,184 (+34.0 MiB)** | 140,509,184 |" in text
    assert "| volume_psi | 2 | 2 | **3 (+1)** |" in text
    assert "[3/3] nightly" in told.err
