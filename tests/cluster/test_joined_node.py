"""A node of a SLURM step that has been joined dies: the step goes on without it, and so does the sweep."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import zerobench
from tests.end_to_end.command import SMALL
from tests.ranks import free_port

from .slurm import Slurm, missing

pytestmark = pytest.mark.thorough

SWEEP = (
    "-m", *SMALL, "strategy=zero1", "world_size=2,1", "measure.steps=12000", "measure.passes=timed",
    "measure.check_training=false",
)  # fmt: skip


@pytest.mark.skipif(bool(missing()), reason=f"no SLURM can be started here: {missing()}")
def test_a_sweep_in_a_step_goes_on_without_a_node(tmp_path: Path) -> None:
    cluster = Slurm(tmp_path / "slurm")
    said = tmp_path / "said.txt"
    port = {"MASTER_PORT": str(free_port())}  # SLURMs of other tests number their jobs alike
    command = ["srun", "--no-kill", "-N2", "-n2", sys.executable, "-m", "zerobench", *SWEEP]
    try:
        cluster.start()
        with said.open("w") as out:
            step = subprocess.Popen(command, cwd=tmp_path, env=cluster.environment | port, stdout=out, stderr=out)
        deadline = time.monotonic() + 180
        while "timed pass, step" not in said.read_text():
            assert step.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.2)
        cluster.kill_node("n2")
        assert step.wait(240) == 1, said.read_text()
    finally:
        cluster.stop()
    runs = zerobench.load(tmp_path / "results/runs").runs.sort_values("started")
    assert list(zip(runs.world_size, runs.status, strict=True)) == [(2, "crash"), (1, "ok")], said.read_text()
    assert "rank 1 is lost: its process says nothing (rank 1 of the job, on " in runs.reason.iloc[0]
    assert runs.reason.iloc[0].endswith("/n2)")
