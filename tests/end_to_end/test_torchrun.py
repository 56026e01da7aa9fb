"""Joining a job: torchrun's, on one machine and as on two, and one that was started by hand, under fire."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd

import zerobench
from tests.end_to_end.command import SMALL, heed_ctrl_c
from tests.end_to_end.command import zerobench as alone
from tests.end_to_end.test_faults import LONG, ranks_of, wait_until_gone
from tests.ranks import free_port

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
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
    """What must not depend on who started the ranks: bytes, volumes, losses."""
    runs = zerobench.load(folder).runs.set_index(["strategy", "world_size"]).sort_index()
    assert (runs.status == "ok").all(), list(runs.reason)
    assert runs.passes_agree.all()
    exact = [name for name in runs if name.endswith(("_bytes", "_psi")) or name.startswith("loss_")]
    return runs[[name for name in exact if name not in ("resident_bytes", "loopback_bytes")]]


def test_torchrun_measures_what_the_plain_command_does(tmp_path: Path) -> None:
    sweep = [*SMALL, "-m", "strategy=zero3", "world_size=1,null", "launch.threads=1"]
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "zerobench", *sweep, "results_dir=joined"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tables: joined") == 1  # one of them speaks
    assert alone(*sweep, "results_dir=alone", cwd=tmp_path).returncode == 0
    pd.testing.assert_frame_equal(measured(tmp_path / "joined"), measured(tmp_path / "alone"))
    assert sorted(p.name for p in (tmp_path / "joined").iterdir()) == sorted(
        p.name for p in (tmp_path / "alone").iterdir()
    )
    run = next((tmp_path / "joined").glob("zero3-*-n2-*"))
    assert '"launched_by": "torchrun",\n "nodes": 1' in (run / "provenance.json").read_text()
    assert (run / "logs/accounted/rank1.log").exists()


def test_two_agents_and_a_users_model(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    work = ["model=mine", "strategy=zero2", "measure=quick", "sequence=16", "device=cpu", "launch.threads=1"]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two"]
    command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *where, "mine.py", *work, "results_dir=two"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    agents = [subprocess.Popen(command, cwd=tmp_path, text=True, **streams) for _ in range(2)]
    said = [agent.communicate(timeout=300) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    subprocess.run([sys.executable, "mine.py", *work, "results_dir=one", "world_size=2"], cwd=tmp_path, check=True)
    pd.testing.assert_frame_equal(measured(tmp_path / "two"), measured(tmp_path / "one"))
    two, one = (zerobench.load(tmp_path / name).runs.iloc[0] for name in ("two", "one"))
    assert pd.isna(two.loopback_bytes)
    assert one.loopback_bytes > 0
    assert two.cell_id != one.cell_id  # bytes are the same, times are not
    assert '"nodes": 2' in (tmp_path / "two" / two.run_id / "provenance.json").read_text()


def start_by_hand(cwd: Path, world_size: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """As srun and mpirun start a job: rank 0's process keeps the store."""
    shared = os.environ | {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "zerobench", *SMALL, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return [
        subprocess.Popen(
            command,
            cwd=cwd,
            text=True,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            preexec_fn=heed_ctrl_c,
            **streams,
        )
        for rank in range(world_size)
    ]


def test_a_job_by_hand_survives_its_ranks_and_stops_as_one(tmp_path: Path) -> None:
    job = start_by_hand(tmp_path, 2, "-m", "strategy=zero1,zero2", "world_size=3,2", *LONG)
    first = [rank for process in job for rank in ranks_of(process, 1)]
    first[1].kill()
    wait_until_gone(first)
    second = [rank for process in job for rank in ranks_of(process, 1)]
    job[1].terminate()
    said = [process.communicate(timeout=60) for process in job]
    assert [process.returncode for process in job] == [130, 130], said
    runs = zerobench.load(tmp_path / "results/runs").runs.sort_values("started")
    assert list(runs.status) == ["invalid", "crash", "invalid", "interrupted"]
    assert runs.reason.iloc[0] == "world_size=3: the job that was joined has 2 ranks; start more, or ask for fewer"
    assert runs.reason.iloc[1] == "timed pass: rank 1 was killed by signal 9 (SIGKILL)"
    assert said[1] == ("", "")  # rank 0 speaks for all
    wait_until_gone(second)


def test_followers_end_with_rank_0_and_half_a_job_is_refused(tmp_path: Path) -> None:
    job = start_by_hand(tmp_path, 2, "strategy=zero1", *LONG)
    ranks = [rank for process in job for rank in ranks_of(process, 1)]
    job[0].kill()
    _, errors = job[1].communicate(timeout=60)
    job[0].communicate()
    assert job[1].returncode == 2
    assert "zerobench: rank 1 of the job: the job's store at 127.0.0.1" in errors
    wait_until_gone(ranks)
    half = [sys.executable, "-m", "zerobench", "strategy=zero1"]
    done = subprocess.run(half, env=os.environ | {"RANK": "0"}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("zerobench: WORLD_SIZE is not set and RANK is: ")
