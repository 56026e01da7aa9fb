"""The verdict on a campaign of kills finds each fault that is planted."""

import json
import shutil
from pathlib import Path

import pytest
from pyarrow import parquet

from tests.unit.test_status_show_prune import make
from validation.kills import Campaign, digest, judge
from zerobench.results.folders import amend_row


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
