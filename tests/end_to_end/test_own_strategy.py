"""Examples of users' code, as a user runs them: a strategy that is swept, budgeted and compared, and a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

import zerobench
from tests.end_to_end.command import SMALL
from tests.end_to_end.command import zerobench as command
from zerobench.plots.marks import learn_colors, look

pytestmark = pytest.mark.thorough

EXAMPLES = Path(__file__).parents[2] / "examples"
SWEEP = ["-m", "strategy=ddp,toy_zero1", "strategy.overlap=true", "accumulation=2", "world_size=2"]


def run(folder: Path, *words: str, example: str = "own_strategy.py") -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, str(EXAMPLES / example), *words]
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of one sweep and a budget of them."""
    folder = tmp_path_factory.mktemp("own_strategy")
    done = run(folder, "budget", "record", "--file", "own.yaml", *SWEEP, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_toy_zero1_trains_as_ddp_and_has_its_states_and_volume(swept: Path) -> None:
    runs = zerobench.load(swept / "results/runs").runs.set_index("strategy")
    ddp, toy = runs.loc["ddp"], runs.loc["toy_zero1"]
    assert (toy.loss_last, toy.grad_norm_last) == (ddp.loss_last, pytest.approx(ddp.grad_norm_last, rel=1e-9))
    assert (ddp.training, toy.training) == ("reference", "equal")
    assert toy.passes_agree
    assert toy.max_parameters_bytes == 4 * toy.psi
    assert 8 * toy.psi / 2 <= toy.max_optimizer_bytes < 0.6 * ddp.max_optimizer_bytes
    assert (toy.volume_psi, toy.control_bytes) == (2.0, 0)
    foretold = ("predicted_states_bytes", "floor_states_bytes", "predicted_volume_psi", "predicted_wire_bytes")
    assert pd.isna(toy[list(foretold)]).all()
    assert not pd.isna(ddp[list(foretold)]).any()
    assert toy.unexplained == ""


def test_its_budget_holds_and_a_lower_one_does_not(swept: Path) -> None:
    done = run(swept, "budget", "check", "own.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("reused an earlier run") + done.stderr.count("reused an earlier run") == 2
    file = yaml.safe_load((swept / "own.yaml").read_text())
    (environment,) = file["environments"].values()
    (limits,) = [cell["limits"] for name, cell in environment["cells"].items() if name.startswith("toy_zero1")]
    limits["states_bytes"] -= 4
    (swept / "lower.yaml").write_text(yaml.safe_dump(file))
    judged = command("budget", "check", "lower.yaml", "--runs", "results/runs", cwd=swept)
    assert judged.returncode == 1
    assert "states_bytes" in judged.stdout + judged.stderr


def test_it_is_read_compared_and_listed_where_its_script_is_not_known(swept: Path) -> None:
    (ddp,) = (swept / "results/runs").glob("ddp-*")
    (toy,) = (swept / "results/runs").glob("toy_zero1-*")
    compared = command("compare", str(ddp), str(toy), cwd=swept)
    assert compared.returncode == 0, compared.stderr
    assert "states_bytes" in compared.stdout
    for words in (("status",), ("show", toy.name), ("export", "--format", "markdown")):
        shown = command(*words, cwd=swept)
        assert shown.returncode == 0, shown.stderr
        assert "toy_zero1" in shown.stdout
    learn_colors(zerobench.load(swept / "results/runs"), [swept / "results/runs"])
    assert look("toy_zero1").color == "#CC79A7"
    refused = command("strategy=toy_zero1", "--dry-run", cwd=swept)
    assert refused.returncode == 2
    assert "strategy=toy_zero1: no such strategy" in refused.stderr


def test_the_example_on_images_trains_alike_under_every_strategy(tmp_path: Path) -> None:
    """As a user would run it, from another folder: one model, one seed, whatever the strategy and the world size."""
    size = ["model.width=8", "model.depth=2", "batch=4", "measure=quick", "device=cpu", "launch.threads=1"]
    sweep = ["-m", "strategy=ddp,zero3", "world_size=1,2"]
    done = run(tmp_path, "model=convnet", "data=images", *size, *sweep, example="images.py")
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
