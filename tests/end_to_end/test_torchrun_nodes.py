"""Joining a job: torchrun's agents, each with its processes, stand for machines; nodes that die."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest

import zerobench
from tests.end_to_end.command import SMALL
from tests.end_to_end.test_faults import LONG, wait_until_gone
from tests.ranks import free_port
from zerobench.cli import run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WITHIN_S = 240


class Agents:
    """torchrun's agents of a job, one per node, the first of which keeps the store."""

    def __init__(self, cwd: Path, ranks: tuple[int, ...], *arguments: str, script: tuple[str, ...] = ()) -> None:
        """`script`: the program and its first words, in place of zerobench's small cell."""
        where = ["--nnodes", str(len(ranks)), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        work = [*(script or ("-m", "zerobench", *SMALL)), *arguments]
        self.agents = [
            subprocess.Popen(
                [*TORCHRUN, *where, "--node-rank", str(node), "--nproc-per-node", str(count), *work],
                cwd=cwd, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **streams,
            )
            for node, count in enumerate(ranks)
        ]  # fmt: skip

    def processes(self, node: int) -> list[psutil.Process]:
        """The agent and everything below it."""
        agent = psutil.Process(self.agents[node].pid)
        return [agent, *agent.children(recursive=True)]

    def wait_for_rank(self, node: int) -> list[psutil.Process]:
        """Waits until a node's rank works: below the agent, zerobench's process and the fork server."""
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            below = self.processes(node)
            if any(_depth(one, self.agents[node].pid) == 3 and sum(one.cpu_times()[:2]) > 1 for one in below):
                return below
            time.sleep(0.1)
        raise AssertionError("no rank came up")

    def end(self) -> tuple[list[int], list[str]]:
        """Returns the agents' exit codes and what they said."""
        said = [agent.communicate(timeout=WITHIN_S)[0] for agent in self.agents]
        return [agent.returncode for agent in self.agents], said


def _depth(process: psutil.Process, above: int) -> int:
    try:
        return next((n for n, parent in enumerate(process.parents(), 1) if parent.pid == above), 0)
    except psutil.NoSuchProcess:
        return 0


def kill(processes: list[psutil.Process]) -> None:
    for one in processes:
        one.kill()
    wait_until_gone(processes)


def runs_in(folder: Path) -> pd.DataFrame:
    return zerobench.load(folder / "results/runs").runs.sort_values("started")


@pytest.mark.thorough
def test_node_that_dies_crashes_cells_that_need_it_and_new_job_runs_them(tmp_path: Path) -> None:
    """Nodes of 1, 1 and 2 ranks; the last dies."""
    cells = ("-m", "measure.passes=timed", "measure.check_training=false", "measure.steps=300", "strategy=zero1,zero2")
    job = Agents(tmp_path, (1, 1, 2), *cells, "world_size=4,2")
    below = job.wait_for_rank(2)
    everything = [process for node in range(3) for process in job.processes(node)]
    kill(below)
    (first, second, _), said = job.end()
    assert (first, second) == (1, 0), said  # the first speaks of two crashes
    wait_until_gone(everything)
    runs = runs_in(tmp_path)
    assert list(zip(runs.strategy, runs.world_size, runs.status, strict=True)) == [
        ("zero1", 4, "crash"), ("zero1", 2, "ok"), ("zero2", 4, "crash"), ("zero2", 2, "ok")
    ], said  # fmt: skip
    lost = r"timed pass: rank [23] is lost: its process says nothing \(rank [23] of the job, on .*"
    assert runs.reason[runs.status == "crash"].str.fullmatch(lost).all()
    again = Agents(tmp_path, (1, 1, 2), *cells, "world_size=4")
    codes, said = again.end()
    assert codes == [0, 0, 0], said
    assert list(runs_in(tmp_path).status[4:]) == ["ok", "ok"]


@pytest.mark.thorough
def test_nothing_outlives_the_agent_of_rank_0(tmp_path: Path) -> None:
    """The agent alone is killed: the kernel ends its own processes, and the store is gone for the others."""
    job = Agents(tmp_path, (1, 1), "strategy=zero1", *LONG)
    everything = [*job.wait_for_rank(0), *job.wait_for_rank(1)]
    job.agents[0].kill()
    codes, said = job.end()
    assert codes == [-9, 1], said
    assert "rank 1 of the job: the job's store at 127.0.0.1" in said[1]
    assert "LostError: the job's store at 127.0.0.1" in said[1], "in torchrun's own report"
    wait_until_gone(everything)
    assert len(zerobench.load(tmp_path / "results/runs").runs) == 0


SCRIPT = """
import torch, zerobench
from torch import nn

class Mine(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary)
    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.head(self.embedding(tokens)).flatten(0, 1), targets.flatten())

def build(vocabulary: int = 256):
    return Mine(vocabulary)

zerobench.register_model("mine", build)
zerobench.main()
"""


def measured(folder: Path) -> pd.DataFrame:
    """Reads the columns that must not depend on how the ranks were started: bytes, volumes, losses."""
    runs = zerobench.load(folder).runs.set_index(["strategy", "world_size"]).sort_index()
    assert (runs.status == "ok").all(), list(runs.reason)
    assert runs.passes_agree.all()
    exact = [name for name in runs if name.endswith(("_bytes", "_psi")) or name.startswith("loss_")]
    return runs[[name for name in exact if name not in ("resident_bytes", "loopback_bytes")]]


@pytest.mark.thorough
def test_torchruns_agents_measure_what_the_plain_command_does(tmp_path: Path) -> None:
    """Three ranks under two agents, 2 + 1, which count as machines: a cell of two ranks is on one, of three on two."""
    (tmp_path / "mine.py").write_text(SCRIPT)
    work = ("mine.py", "-m", "model=mine", "strategy=zero2", "measure=quick", "sequence=16", "device=cpu",
            "launch.threads=1")  # fmt: skip
    codes, said = Agents(tmp_path, (2, 1), "world_size=2,null", "results_dir=joined", script=work).end()
    assert codes == [0, 0], said
    assert [out.count("tables: joined") for out in said] == [1, 0]  # one of them speaks
    alone = [sys.executable, *work, "world_size=2,3", "results_dir=alone"]
    subprocess.run(alone, cwd=tmp_path, check=True, capture_output=True)
    pd.testing.assert_frame_equal(measured(tmp_path / "joined"), measured(tmp_path / "alone"))
    (two, three), (two_alone, three_alone) = (
        zerobench.load(tmp_path / name).runs.sort_values("world_size").itertuples() for name in ("joined", "alone")
    )
    assert two.cell_id == two_alone.cell_id
    assert three.cell_id != three_alone.cell_id  # bytes are the same, times are not
    assert pd.isna(three.loopback_bytes)
    assert two.loopback_bytes > 0
    for row, nodes in ((two, 1), (three, 2)):
        folder = tmp_path / "joined" / row.run_id
        assert f'"launched_by": "torchrun",\n "nodes": {nodes}' in (folder / "provenance.json").read_text()
        assert (folder / f"logs/accounted/rank{row.world_size - 1}.log").exists()


def test_half_a_job_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    assert run(["strategy=zero1"]) == 2
    assert capsys.readouterr().err.startswith("zerobench: WORLD_SIZE is not set and RANK is: ")
