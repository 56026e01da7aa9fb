"""Sweeps through `hydra/launcher=submitit_slurm` on a real SLURM of two nodes, which has no sacct."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .slurm import Slurm

pytestmark = pytest.mark.thorough

LONG = 1_000_000
"""Steps of a cell that is still running when something happens to it."""

WITHIN_S = 500.0
"""Time, in seconds, for a sweep on a machine that is busy with other tests."""


@pytest.fixture(autouse=True)
def _plugin() -> None:
    pytest.importorskip("submitit", reason="SLURM's plugin is not installed: pip install hydra-submitit-launcher")


class Sweep:
    """A sweep that is composed in a process of its own. `said`: what it prints."""

    def __init__(self, slurm: Slurm, results: Path, *words: str) -> None:
        self.slurm, self.results = slurm, results
        self.said = results.with_name(f"{results.name}-{time.monotonic_ns()}.txt")
        command = [
            sys.executable, "-m", "zerobench", "-m", "model=gpt_tiny", "measure.passes=accounted", *words,
            "hydra/launcher=submitit_slurm", f"results_dir={results}",
        ]  # fmt: skip
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                command, env=slurm.environment, stdout=said, stderr=said, start_new_session=True
            )

    def wait(self) -> int:
        """Returns the exit code."""
        return self.process.wait(WITHIN_S)

    def end(self) -> None:
        """Ends its processes, of a test that has failed."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def text(self) -> str:
        return self.said.read_text(errors="replace")

    def rows(self) -> list[dict[str, object]]:
        return [json.loads(path.read_text()) for path in sorted(self.results.glob("[!.]*/run.json"))]

    def running(self, count: int) -> list[str]:
        """Waits until so many launches, of many steps, have run one, and returns the ids of the jobs that run."""
        self.slurm.wait_for(lambda: self._steps() >= count or self.process.poll() is not None, WITHIN_S, self.text())
        assert self.process.poll() is None, self.text()
        return [one for one, (state, _) in self.slurm.jobs().items() if state == "RUNNING"]

    def _steps(self) -> int:
        boards = [json.loads(path.read_text()) for path in self.results.glob(".sweep-*/*.json")]
        steps = [
            str(launch["step"]) for board in boards for launch in board["launches"] if launch["state"] == "running"
        ]
        return sum(int(step.partition("/")[2] or 1) > 100 for step in steps)

    def folders(self) -> list[Path]:
        return sorted(self.results.glob("[!.]*"))


Start = Callable[..., Sweep]


@pytest.fixture
def start(slurm: Slurm, tmp_path: Path) -> Iterator[Start]:
    """Starts sweeps into one results folder, and ends those that a test leaves, and their jobs."""
    sweeps: list[Sweep] = []

    def started(*words: str) -> Sweep:
        sweeps.append(Sweep(slurm, tmp_path / "runs", *words))
        return sweeps[-1]

    yield started
    for sweep in sweeps:
        sweep.end()
    slurm.ask("scancel", "--quiet", "--me")


def test_cells_of_three_sizes_run_on_two_nodes(slurm: Slurm, start: Start) -> None:
    words = ("strategy=ddp,zero1,zero2,zero3", "world_size=1,2,4", "measure.steps=1", "hydra.launcher.tasks_per_node=2",
             "hydra.launcher.cpus_per_task=1")  # fmt: skip
    sweep = start(*words)
    assert sweep.wait() == 0, sweep.text()
    rows = sweep.rows()
    assert len(rows) == 12
    assert {(row["status"], row["launcher"]) for row in rows} == {("ok", "submitit_slurm")}
    placed = {
        json.loads((path / "provenance.json").read_text())["nodes"] for path in sweep.folders() if "-n4-" in path.name
    }
    assert placed == {2}
    assert sum(" ok " in line for line in sweep.text().splitlines()) >= 12, "the final table"
    assert not list(sweep.results.glob(".jobs-*"))
    before = slurm.jobs()
    again = start(*words)
    assert again.wait() == 0, again.text()
    assert set(slurm.jobs()) == set(before), "finished cells need no job"
    assert len(again.rows()) == 12


def test_a_lost_job_is_a_row_and_the_sweep_goes_on(slurm: Slurm, start: Start) -> None:
    """Three cells run side by side; one loses its node, and the others end ok."""
    sweep = start("strategy=ddp", f"measure.steps=400,401,{LONG}", "world_size=1", "hydra.launcher.cpus_per_task=4")
    slurm.wait_for(lambda: len(sweep.rows()) == 2 or sweep.process.poll() is not None, WITHIN_S, sweep.text())
    (job,) = sweep.running(1)
    slurm.ask("scancel", "--signal=KILL", "--full", job)
    assert sweep.wait() == 1, sweep.text()
    assert sorted(str(row["status"]) for row in sweep.rows()) == ["crash", "ok", "ok"]


def test_ctrl_c_ends_what_runs(slurm: Slurm, start: Start) -> None:
    other = slurm.ask("sbatch", "--parsable", "--begin=now+1hour", "--output=/dev/null", "--wrap=true").strip()
    steps = ",".join(str(LONG + cell) for cell in range(4))
    sweep = start(
        "strategy=zero2", "world_size=2", f"measure.steps={steps}",
        "hydra.launcher.cpus_per_task=4",
    )  # fmt: skip
    running = sweep.running(2)
    waiting = [one for one, (state, _) in slurm.jobs().items() if state == "PENDING" and one != other]
    assert (len(running), len(waiting)) == (2, 2)
    os.kill(sweep.process.pid, signal.SIGINT)
    assert sweep.wait() == 130, sweep.text()
    slurm.wait_for(lambda: not slurm.steps(), 60.0, "end of all steps")
    jobs = slurm.jobs()
    assert not {jobs[one][0] for one in running} & {"RUNNING", "PENDING"}
    assert jobs[other][0] == "PENDING", "a job that is not ours"
    slurm.ask("scancel", other)
    assert [(row["status"], row["reason"]) for row in sweep.rows()] == [("interrupted", "stopped by the user")] * 2
    assert not list(sweep.results.glob(".jobs-*"))


def test_jobs_of_a_killed_sweep_finish_and_the_next_one_has_their_rows(slurm: Slurm, start: Start) -> None:
    words = ("strategy=ddp,zero1", "world_size=1", "measure.steps=400", "hydra.launcher.cpus_per_task=4")
    killed = start(*words)
    killed.running(1)
    os.killpg(killed.process.pid, signal.SIGKILL)
    killed.process.wait()
    sweep = start(*words)
    assert sweep.wait() == 0, sweep.text()
    assert [row["status"] for row in sweep.rows()] == ["ok", "ok"], "none is run twice"
    assert len(sweep.folders()) == 2
    slurm.wait_for(lambda: not slurm.steps(), 60.0, "end of all steps")
