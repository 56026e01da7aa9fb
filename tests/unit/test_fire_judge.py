"""The verdict on a campaign finds each fault that is planted; draws repeat; only the campaign's processes are shot."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from random import Random

import pytest

from tests.unit.test_status_show_prune import make
from validation.fire.campaign import Campaign, digest
from validation.fire.judge import CampaignVerdict, judge, write
from validation.fire.shots import HELPER, MARK, Shot, send, victims
from zerobench.results.folders import amend_row


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    """A campaign that is done: two launches, of which one was shot before it was finished."""
    calm = tmp_path / "calm"
    rows = [json.loads((make(calm, name) / "run.json").read_text()) for name in ("ddp", "zero2")]
    shutil.copytree(calm, tmp_path / "fired")
    shot = make(tmp_path / "fired", "zero2", status="crash", reason="rank 1 was killed", seconds=1.0)
    launches = [[row["cell_id"], row["repeat"], row["status"]] for row in rows]
    again = make(tmp_path / "fired", "zero2")
    shutil.rmtree(tmp_path / "fired" / rows[1]["run_id"])  # else it would have been measured twice
    (tmp_path / "calm.json").write_text(json.dumps({"two": {"code": 0, "launches": launches, "seconds": 1.0}}))
    made = Campaign(tmp_path, "local", 1, 1.0)
    made.state.seen = {path.name: digest(path) for path in (shot, again)}
    begun = json.loads((shot / "run.json").read_text())["started"]
    made.shots = [Shot(1, 1, "two", begun, "running", "SIGKILL", "rank", 1, shot.name.rpartition("-")[0], "timed pass")]
    return made


def words_of(verdict: CampaignVerdict) -> str:
    return "\n".join([*verdict.differences, *verdict.leftovers, *verdict.faults])


@pytest.mark.thorough
@pytest.mark.slow
def test_a_clean_campaign_is_clean_and_each_planted_fault_is_found(campaign: Campaign, tmp_path: Path) -> None:
    verdict = judge(campaign, {"two": 0})
    assert verdict.is_clean, words_of(verdict)
    assert verdict.counts["bad_runs"] == 1
    assert str(campaign.shots[0].outcome).startswith("crash: zero2")
    write(campaign, verdict, tmp_path / "out")
    assert "equal to the undisturbed sweep" in (tmp_path / "out/summary.md").read_text()
    finished = next(name for name in campaign.state.seen if "-2-x" not in name)
    campaign.shots, campaign.state.orphans = [], ["start 1: rank 7"]
    campaign.state.lost, campaign.state.hung = ["a-run"], ["start 2"]
    make(campaign.fired, "ddp")
    (campaign.fired / ".partial-x").mkdir()
    (campaign.work / "tmp/zerobench-tmp-1").mkdir()
    amend_row(campaign.fired / finished, {"peak_bytes": 7})
    found = words_of(judge(campaign, {"two": 1}))
    for words in (
        "was not shot", "orphan: start 1", "a-run: the run was there", "hung: start 2", "2 finished runs",
        "fired/.partial-x", "tmp/zerobench-tmp-1", "peak_bytes is 7", "has changed", "one more sweep ended with 1"
    ):  # fmt: skip
        assert words in found, words  # fmt: skip
    shutil.rmtree(campaign.fired)
    campaign.fired.mkdir()
    assert words_of(judge(campaign, {"two": 0})).count("no run; the calm one is ok") == 2


def test_only_processes_with_the_campaigns_mark_are_shot() -> None:
    campaign = f"test-{Random().getrandbits(48):x}"
    with (
        subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: f"{campaign}:3"}) as mine,
        subprocess.Popen(["sleep", "60"]) as stranger,
    ):
        end = time.monotonic() + 10  # the kernel shows an environment a moment after the program has begun
        while not victims(campaign) and time.monotonic() < end:
            time.sleep(0.01)
        assert [(one.pid, one.role, one.start) for one in victims(campaign)] == [(mine.pid, HELPER, 3)]
        assert not send(campaign, stranger.pid, signal.SIGKILL)
        assert not send(campaign, os.getpid(), signal.SIGKILL)
        assert send(campaign, mine.pid, signal.SIGKILL)
        assert mine.wait(10) == -signal.SIGKILL
        assert not send(campaign, mine.pid, signal.SIGKILL)
        assert stranger.poll() is None
        stranger.kill()
