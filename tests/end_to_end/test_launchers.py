"""Sweeps through launchers of Hydra's (joblib, submitit, Ray, plugins of others) have the rows of this machine's."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import psutil
import pytest

from zerobench.budgets.comparison import EXACT
from zerobench.results.folders import JOBS
from zerobench.results.tables import load
from zerobench.sweep import jobs

from .command import SMALL, start, zerobench

pytestmark = pytest.mark.thorough

WORDS = ["-m", *SMALL, "strategy=zero2", "optimizer=sgd", "optimizer.lr=0.1,1e6", "world_size=2",
         "measure.passes=accounted", "results_dir=results"]  # fmt: skip
"""Two cells; with the larger learning rate the training diverges."""

PLUGINS = Path(__file__).parents[1] / "projects" / "launchers"


@pytest.fixture(autouse=True)
def _pool_ends() -> Iterator[None]:
    """Ends the processes that joblib keeps for a later sweep of this process; a command's end with it."""
    yield
    if "joblib" in sys.modules:
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor().shutdown(wait=True)


def rows_of(folder: Path) -> pd.DataFrame:
    """The runs of a folder by cell, with what does not depend on the moment."""
    runs = load(folder).runs.set_index("cell_id").sort_index()
    same = ["status", "reason", "loss_first", "loss_last", "grad_norm_last", "training", "threads", *EXACT]
    return runs[same]


def test_a_launchers_rows_are_those_of_this_machine_and_are_reused(tmp_path: Path, monkeypatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    zerobench(*WORDS, cwd=here)
    words = [*WORDS, "hydra/launcher=joblib"]
    monkeypatch.setattr(jobs, "program", lambda: ["-m", "zerobench"])
    done = zerobench(*words, cwd=there)
    assert done.returncode == 1, "one diverges"
    assert "job 1 of joblib: zero2 gpt_tiny N=2 b=8 sgd lr=0.1" in done.stderr
    runs = load(there / "results").runs
    assert sorted(runs["status"]) == ["diverged", "ok"]
    assert set(runs["launcher"]) == {"joblib"}
    assert set(load(here / "results").runs["launcher"]) == {"local"}
    pd.testing.assert_frame_equal(rows_of(there / "results"), rows_of(here / "results"))
    assert list((there / "results").glob(f"{JOBS}*")) == []
    again = zerobench(*words, "optimizer.lr=0.1", cwd=there)
    assert again.returncode == 0
    assert "job " not in again.stderr
    assert again.stderr.count("reused an earlier run") == 1


@pytest.mark.parametrize("launcher", ["submitit_local", "joblib"])
def test_a_killed_job_is_a_row(tmp_path: Path, launcher: str) -> None:
    words = ["-m", *SMALL, "strategy=zero1", "world_size=2", "measure.steps=100000", f"hydra/launcher={launcher}"]
    process = start(tmp_path, *words, "results_dir=results")
    killed: list[int] = []
    while not killed and process.poll() is None:
        time.sleep(0.1)
        killed += kill_jobs(tmp_path / "results", process.pid)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 1, out + errors
    (found,) = [json.loads(path.read_text()) for path in (tmp_path / "results").glob("*/run.json")]
    assert (found["status"], found["launcher"]) == ("crash", launcher)
    assert "the same command runs it again" in errors
    assert not any(psutil.pid_exists(one) for one in killed)
    assert not list((tmp_path / "results").glob(f"{JOBS}*"))


def kill_jobs(results: Path, parent: int) -> list[int]:
    """Kills the commands of jobs once a pass of theirs is running, and returns them."""
    if not any(results.glob(".partial-zero1-*/logs/*")):
        return []
    children = psutil.Process(parent).children(recursive=True)
    commands = {child.pid: child.ppid() for child in children if "hydra.mode=RUN" in child.cmdline()}
    jobs = [pid for pid, above in commands.items() if above not in commands]
    for pid in jobs:
        os.kill(pid, signal.SIGKILL)
    return jobs


def test_a_launcher_of_others_works_unchanged_and_its_failures_are_rows(tmp_path: Path) -> None:
    words = ["-m", *SMALL, "strategy=ddp", "world_size=1", "measure.passes=accounted"]
    ends = {"processes": ("ok", ""), "closed": ("crash", "failed: RuntimeError: the cluster is closed until Monday"),
            "forgetful": ("crash", "ended without a row for it")}  # fmt: skip
    for launcher, (status, reason) in ends.items():
        more = [f"hydra/launcher={launcher}", "hydra.launcher.limit=3", f"results_dir={launcher}"]
        process = start(tmp_path, *words, *more, env={**os.environ, "PYTHONPATH": str(PLUGINS)})
        out, errors = process.communicate(timeout=200)
        assert process.returncode == int(status != "ok"), out + errors
        runs = load(tmp_path / launcher).runs
        assert list(runs["status"]) == [status], errors
        assert set(runs["launcher"]) == {launcher}
        assert all(reason in one for one in runs["reason"])
