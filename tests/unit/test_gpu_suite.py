"""Parts of the GPU suite that no GPU is needed for: comparisons, causes of reserved memory, the clock, estimates."""

import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from tests.cells import MODELS, cell
from validation import gpu_runs
from validation.__main__ import main
from validation.gpu_runs import steps
from validation.gpu_suite import SECTIONS, cells, command, engine
from validation.gpu_suite.command import MINUTES, RESERVE_S
from validation.gpu_suite.suite import (
    SuiteLaunch,
    SuiteSection,
    SuiteSetup,
    SuiteTable,
    SuiteTask,
)  # fmt: skip
from validation.one_gpu import PARTS, fitted, refitted
from validation.published.figure import activation_bytes, shape_of
from zerobench.config import schema as schemas
from zerobench.config import world
from zerobench.config.compose import compose_cells
from zerobench.config.schema import Measure
from zerobench.config.schema_memory import CheckpointOffloadActivations, OffloadActivations
from zerobench.config.schema_training import Bf16, Fp32
from zerobench.predict.activations import moved_bytes
from zerobench.results import provenance, tables
from zerobench.sweep.cell import run_cell
from zerobench.timing import hardware
from zerobench.zero.comm.base import Comm


def test_a_collective_with_a_wrong_value_is_not_working() -> None:
    with pytest.raises(ValueError, match="all_reduce: 1 of 3 values are wrong"):
        engine.check_equal("all_reduce", torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0]))
    with pytest.raises(ValueError, match="reduce_scatter into another place: 4095 of 4096 values are wrong"):
        engine.check_comm(Comm(), torch.device("cpu"))  # which sends nothing


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
    "layers": schemas.Gpt(layers=6, hidden=96, heads=4, checkpointing=True),
    "offloaded": schemas.Gpt(layers=5, hidden=96, heads=4),
    "large logits": schemas.Gpt(layers=4, hidden=96, heads=4, vocabulary=5000),
    "logits": schemas.Gpt(layers=3, hidden=96, heads=4, vocabulary=5000, checkpointing=True),
}


OFFLOAD, BOTH = OffloadActivations(), CheckpointOffloadActivations()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "more"),
    [
        pytest.param("kept", Bf16(), {}, marks=pytest.mark.thorough),
        pytest.param("layers", Fp32(), {}, marks=pytest.mark.thorough),
        pytest.param("logits", Fp32(), {}, marks=pytest.mark.thorough),
        pytest.param("offloaded", Fp32(), {"activation": OFFLOAD}, marks=pytest.mark.thorough),
        ("offloaded", Bf16(), {"activation": BOTH}),
        pytest.param("large logits", Fp32(), {"activation": OFFLOAD}, marks=pytest.mark.thorough),
        pytest.param("large logits", Fp32(), {"activation": BOTH}, marks=pytest.mark.thorough),
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


def answer(job: Any, tell: Any) -> int:
    return int(job)


@pytest.mark.slow
def test_a_difference_or_a_failure_ends_with_1(tmp_path: Path, monkeypatch, capsys) -> None:
    def differs(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
        return SuiteTable(["cell"], [["one"]], differs=["zero2: losses differ"])

    tasks = [SuiteTask("one", answer, [1], 30.0)]
    monkeypatch.setitem(SECTIONS, "engine", SuiteSection("engine", "B", "A?", (), differs, tasks=lambda _: tasks))
    monkeypatch.setattr(command, "age_s", lambda: 0.0)  # pytest may be older than eight minutes
    assert main(["gpu-suite", "--out", str(tmp_path / "a"), "--device", "cpu", "--small", "--only", "engine"]) == 1
    assert "engine: zero2: losses differ" in capsys.readouterr().out
    assert main(["gpu-suite", "--out", str(tmp_path / "b"), "--device", "cpu", "--small", "--minutes", "0.01"]) == 1
    told = capsys.readouterr().out
    assert "parity: all of it: not run: the time was over" in told
    assert "not reached: 9" in told


@pytest.fixture
def on_an_h200(monkeypatch) -> None:
    monkeypatch.setattr(world, "_count_gpus", lambda: 1)
    monkeypatch.setattr(provenance, "device_class", lambda device: "NVIDIA H200")


def test_the_plan_in_the_documents_is_the_plan_and_fits() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/gpu-suite.md").read_text()
    for section in SECTIONS.values():
        assert re.search(rf"^\| {section.name} \|.*\| {section.expected_s} s \|$", page, re.MULTILINE), section.name
    assert sum(section.expected_s for section in SECTIONS.values()) <= 60 * MINUTES - RESERVE_S


@pytest.mark.parametrize("words", [(), ("precision.tile_bytes=256MiB",)])
def test_half_precision_cell_composes_for_a_gpu(words: tuple[str, ...], on_an_h200: None) -> None:
    asked = ["strategy=ddp,zero1,zero2,zero3", "precision=bf16,fp16", "device=cuda", "world_size=1", *words]
    assert [composed.problems for composed in compose_cells(["-m", *asked])] == [()] * 8


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


def test_a_step_is_compared_only_with_the_run_of_its_shape(tmp_path: Path) -> None:
    found = steps(HERE)
    assert len({step.cell for step in found}) == len(found) == 10
    for name in (*(f"{table}.parquet" for table in tables.TABLES), "suite.json"):
        if (HERE / name).exists():
            shutil.copy(HERE / name, tmp_path / name)
    lines = (HERE / gpu_runs.PREDICTED).read_text().splitlines()
    (tmp_path / gpu_runs.PREDICTED).write_text("\n".join([lines[0], lines[1].replace(",8,1,1024,", ",16,1,1024,")]))
    assert steps(tmp_path) == []


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
