"""Joining a job: torchrun's, as on one machine and on two, and one that was started by hand, under fire."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import zerobench
from tests.ranks import free_port
from zerobench.cli import run

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
    """Reads the columns that must not depend on how the ranks were started: bytes, volumes, losses."""
    runs = zerobench.load(folder).runs.set_index(["strategy", "world_size"]).sort_index()
    assert (runs.status == "ok").all(), list(runs.reason)
    assert runs.passes_agree.all()
    exact = [name for name in runs if name.endswith(("_bytes", "_psi")) or name.startswith("loss_")]
    return runs[[name for name in exact if name not in ("resident_bytes", "loopback_bytes", "heap_bytes")]]


@pytest.mark.thorough
def test_torchruns_agents_measure_what_the_plain_command_does(tmp_path: Path) -> None:
    """Three ranks under two agents, 2 + 1, which count as machines: a cell of two ranks is on one, of three on two."""
    (tmp_path / "mine.py").write_text(SCRIPT)
    work = ["-m", "model=mine", "strategy=zero2", "measure=quick", "sequence=16", "device=cpu", "launch.threads=1"]
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    agents = [
        subprocess.Popen(
            [*TORCHRUN, *where, "--node-rank", str(node), "--nproc-per-node", str(ranks), "mine.py", *work,
             "world_size=2,null", "results_dir=joined"],
            cwd=tmp_path, text=True, **streams,
        )
        for node, ranks in enumerate((2, 1))
    ]  # fmt: skip
    said = [agent.communicate(timeout=300) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert [out.count("tables: joined") for out, _ in said] == [1, 0]  # one of them speaks
    alone = [sys.executable, "mine.py", *work, "world_size=2,3", "results_dir=alone"]
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
