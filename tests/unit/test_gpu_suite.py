"""Parts of the GPU suite that no GPU is needed for: comparisons, causes of reserved memory, the clock, estimates."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.cells import MODELS, cell
from validation.gpu_suite import SECTIONS, cells
from validation.gpu_suite.suite import SuiteSetup
from validation.one_gpu import PARTS, fitted, refitted
from validation.published.figure import activation_bytes, shape_of
from zerobench.config import schema as schemas
from zerobench.config import world
from zerobench.config.schema import Measure
from zerobench.config.schema_memory import CheckpointOffloadActivations, OffloadActivations
from zerobench.config.schema_training import Bf16, Fp32
from zerobench.predict.estimate import moved_bytes
from zerobench.results import provenance
from zerobench.simulation import hardware
from zerobench.sweep.cell import run_cell


def test_memory_that_was_reserved_beside_free_memory_has_a_cause() -> None:
    def entry(action: str, size: int, category: str = "") -> dict[str, Any]:
        return {"action": action, "size": size, "category": category}

    trace = [
        entry("segment_alloc", 20), entry("alloc", 20, "optimizer"), entry("free_completed", 20),
        entry("segment_alloc", 20), entry("alloc", 15, "activations"), entry("segment_alloc", 30),
        entry("alloc", 30, "temporary"), entry("segment_free", 20),
    ]  # fmt: skip
    assert cells.fragmentation(trace) == {"activations": 20}, "30 more than were free is no fragmentation"


SHAPES = {
    "kept": schemas.Gpt(layers=6, hidden=96, heads=4, vocabulary=500),
    "offloaded": schemas.Gpt(layers=5, hidden=96, heads=4),
    "logits": schemas.Gpt(layers=3, hidden=96, heads=4, vocabulary=5000, checkpointing=True),
}


OFFLOAD, BOTH = OffloadActivations(), CheckpointOffloadActivations()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "more"),
    [
        ("kept", Bf16(), {}),
        ("logits", Fp32(), {}),
        ("offloaded", Bf16(), {"activation": OFFLOAD}),
        ("offloaded", Bf16(), {"activation": BOTH}),
    ],
)
def test_activations_are_as_the_formula_says(
    name: str, precision: Any, more: dict[str, Any], tmp_path: Path, monkeypatch
) -> None:
    """The peak without states, of a rank of 64 under zero3, whose states are small, within 4 %.

    In host memory to the byte.
    """
    monkeypatch.setitem(MODELS, name, SHAPES[name])
    how: dict[str, Any] = {"precision": precision, "measure": Measure(1, 2, passes="accounted"), **more}
    one = cell("zero3", 64, name, backend="simulated", sequence=128, results_dir=str(tmp_path), **how)
    row = run_cell(one, lambda _: None)
    assert row.status == "ok", row.reason
    measured = row.peak_activations_bytes + (row.peak_temporary_bytes or 0)
    assert activation_bytes(shape_of(one.config)) == pytest.approx(measured, rel=0.04)
    assert moved_bytes(one.config) == row.host_peak_bytes


@pytest.fixture
def on_an_h200(monkeypatch) -> None:
    monkeypatch.setattr(world, "_count_gpus", lambda: 1)
    monkeypatch.setattr(provenance, "device_class", lambda device: "NVIDIA H200")


@pytest.mark.thorough
def test_the_full_plan_composes_for_a_gpu(tmp_path: Path, on_an_h200: None) -> None:
    """What can be known of cells that this machine cannot run: none is refused."""
    setup = SuiteSetup(tmp_path, "cuda", False)
    counts = {}
    for name in ("update", "speed", "peaks", "memory", "tiers", "parity", "profile"):
        cells = SECTIONS[name].cells(setup)
        assert not [cell.problems for cell in cells if cell.problems]
        assert {cell.config.device for cell in cells} == {"cuda"}
        counts[name] = sum(cell.config.measure.repeats for cell in cells)
    assert counts == {"update": 9, "speed": 25, "peaks": 10, "memory": 10, "tiers": 10, "parity": 22, "profile": 2}


ROOT = Path(__file__).parents[2]
HERE = ROOT / "results" / "h100"


def test_seven_rates_place_all_ten_steps_also_without_the_step_itself() -> None:
    assert fitted(pd.read_csv(HERE / PARTS)) == pytest.approx(hardware.validated()["one_gpu"], rel=1e-3)
    found = refitted(HERE)
    assert found["measured"].between(found["low"], found["high"]).tolist() == [True] * 10
    for column in ("predicted", "left_out"):
        assert (found[column] / found["measured"] - 1).abs().median() < 0.05
    alone = refitted(HERE, lambda one, other: one.split()[1] == other.split()[1])
    without = (alone["left_out"] / alone["measured"] - 1).abs()
    assert without.median() < 0.12
    assert without.max() > 0.2, "the 1.5B model alone cannot tell unaligned products apart"
