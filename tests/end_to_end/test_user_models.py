"""Models and data of users: theory on what it was not written for, and the example of the documentation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import zerobench

pytestmark = pytest.mark.thorough

SCRIPT = """
import torch, zerobench
from torch import nn
from torch.nn import functional as F

class Base(nn.Module):
    def __init__(self, vocabulary, width=40, blocks=4):
        super().__init__()
        self.head = nn.Linear(width, vocabulary)
        self.blocks = nn.ModuleList(self.block(width, number) for number in range(blocks))
        self.embedding = nn.Embedding(vocabulary, width)
    def block(self, width, number):
        inner = width * (number + 1)
        return nn.Sequential(nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False))
    def order(self):
        return self.blocks
    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.order():
            x = x + torch.tanh(block(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

class Frozen(Base):
    def __init__(self, vocabulary):
        super().__init__(vocabulary)
        self.blocks[1].requires_grad_(False)
        self.blocks[2][0].requires_grad_(False)
        self.embedding.requires_grad_(False)

class Unused(Base):
    def order(self):
        return [self.blocks[0], self.blocks[3]]

class Repeated(Base):
    def order(self):
        return [*self.blocks, self.blocks[0]]

class Reversed(Base):
    def order(self):
        return list(self.blocks)[::-1]

class Normalized(Base):
    def block(self, width, number):
        return nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(16))

def register(kind):
    def build(vocabulary: int = 256):
        return kind(vocabulary)
    zerobench.register_model(kind.__name__.lower(), build)

for kind in (Frozen, Unused, Repeated, Reversed, Normalized):
    register(kind)
zerobench.main()
"""


def swept(tmp_path: Path, strategy: str, *more: str) -> pd.DataFrame:
    (tmp_path / "models.py").write_text(SCRIPT)
    models = "model=frozen,unused,repeated,reversed,normalized"
    size = ["world_size=2", "sequence=16", "measure=quick", "device=cpu", "launch.threads=1"]
    command = [sys.executable, "models.py", "-m", models, f"strategy={strategy}", *size, *more]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    runs = zerobench.load(tmp_path / "results/runs").runs.set_index(["strategy", "model"])
    assert len(runs) == 5 * len(strategy.split(","))
    for which, run in runs.iterrows():
        assert run.states_bytes == pytest.approx(run.predicted_states_bytes, rel=0.01), which
        assert run.volume_psi == run.predicted_volume_psi, which
    for name, control in runs.control_bytes.groupby("strategy"):
        assert control[name, "normalized"] > control[name, "reversed"]  # BatchNorm's buffers are sent
    return runs


def test_states_and_volumes_of_unusual_models(tmp_path: Path) -> None:
    assert swept(tmp_path, "zero3").passes_agree.all()


def test_one_rank_of_them_alone(tmp_path: Path) -> None:
    """Which is as another strategy's whole world, and sooner done."""
    more = ["backend=simulated", "strategy.find_unused_parameters=true"]
    assert swept(tmp_path, "ddp,zero1,zero2", *more).passes_agree.isna().all()


def test_the_example_on_images_trains_alike_under_every_strategy(tmp_path: Path) -> None:
    """As a user would run it, from another folder: one model, one seed, whatever the strategy and the world size."""
    example = Path(__file__).parents[2] / "examples/images.py"
    size = ["model.width=8", "model.depth=2", "batch=4", "measure=quick", "device=cpu", "launch.threads=1"]
    sweep = ["-m", "strategy=ddp,zero3", "world_size=1,2"]
    command = [sys.executable, str(example), "model=convnet", "data=images", *size, *sweep]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = zerobench.load(tmp_path / "results/runs").runs.set_index(["strategy", "world_size"])
    assert set(runs.data) == {"images"}
    assert runs.loss_last["ddp", 2] == runs.loss_last["zero3", 2]
    assert runs.loss_last["ddp", 1] == pytest.approx(runs.loss_last["ddp", 2], rel=1e-6)
    assert runs.passes_agree.all()
    images = 4 * (3 * 16 * 16 * 4 + 8)
    assert runs.max_inputs_bytes["ddp", 1] == images, "the images and labels of a batch are inputs, no more"
    assert runs.states_bytes["zero3", 2] == runs.predicted_states_bytes["zero3", 2]
    assert runs.tokens_per_s["ddp", 1] == pytest.approx(3 * 4 / runs.wall_s["ddp", 1])
