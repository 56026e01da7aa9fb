"""Models and data of users: theory on what it was not written for, and the example of the documentation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import zerobench

pytestmark = pytest.mark.thorough


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
