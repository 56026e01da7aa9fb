"""Saves of a checkpoint in the measured steps: their times, their memory, and that they change no loss."""

from pathlib import Path

import pandas as pd
import pytest

from tests.cells import cell
from zerobench.config.schema import Measure
from zerobench.results.tables import Results, load
from zerobench.sweep.cell import run_cell

HOW = ("none", "blocking", "asynchronous")
RANKS = 2


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def measured(where: Path) -> Results:
    """A run each, with saves after the measured steps 2 and 4 of 5."""
    for how in HOW:
        measure = Measure(steps=5, warmup=2, save=how, save_every=2)
        run = run_cell(cell("zero2", RANKS, "million", measure=measure, results_dir=str(where)), lambda _: None)
        assert (run.status, run.unexplained) == ("ok", "")
    return load(where)


def test_a_save_has_its_times_and_the_step_that_it_ends(measured: Results) -> None:
    none, blocking, asynchronous = measured.runs.to_dict("records")
    assert all(pd.isna(none[name]) for name in ("save_s", "save_done_s", "save_step_s", "checkpoint_bytes"))
    assert 0 < blocking["save_s"] == blocking["save_done_s"] < blocking["save_step_s"]
    assert 0 < asynchronous["save_s"] <= asynchronous["save_done_s"]
    steps = measured.steps[measured.steps["mode"] == "timed"]
    for run in (blocking, asynchronous):
        held = steps[(steps["run_id"] == run["run_id"]) & steps["save_s"].notna()]
        assert set(held["step"]) == {1, 3, 5}, "the warm-up's last step, and each second measured one"
        assert (held["save_s"] < held["seconds"]).all()
        assert held["save_in_flight"].all()
    others = steps[(steps["run_id"] == blocking["run_id"]) & steps["save_s"].isna()]
    assert not others["save_in_flight"].any(), "a blocking save has ended when the next step begins"


def test_an_asynchronous_save_copies_the_states_of_a_rank(measured: Results) -> None:
    none, blocking, asynchronous = measured.runs.to_dict("records")
    assert none["save_peak_bytes"] is None
    assert blocking["peak_bytes"] == pytest.approx(none["peak_bytes"], abs=4096)
    assert blocking["checkpoint_bytes"] == asynchronous["checkpoint_bytes"]
    states = 12 * none["psi"]  # fp32 parameters and two moments
    assert blocking["checkpoint_bytes"] == pytest.approx(states, rel=0.02)
    copied = asynchronous["save_peak_bytes"] - blocking["save_peak_bytes"]
    assert copied == pytest.approx(states / RANKS, rel=0.1)


def test_saves_change_no_loss_and_leave_no_file(measured: Results, where: Path) -> None:
    losses = {tuple(rows.sort_values(["mode", "rank", "step"])["loss"]) for _, rows in measured.steps.groupby("run_id")}
    assert len(losses) == 1
    assert measured.runs["passes_agree"].all()
    assert len(list(where.glob("*/run.json"))) == len(HOW)
    assert not [*where.rglob("saves"), *where.rglob("*.safetensors")]


def test_a_save_that_cannot_be_is_refused() -> None:
    def problems(strategy: str = "zero2", measure: Measure | None = None, **more: object) -> str:
        measure = measure or Measure(steps=5, warmup=2, save="blocking")
        return " ".join(cell(strategy, RANKS, measure=measure, **more).problems)

    assert problems() == ""
    assert problems("ddp") == "measure.save=blocking: strategy=ddp writes no checkpoint here; use zero1, zero2, zero3"
    assert "one rank alone has states to write" in problems(backend="simulated")
    assert "leave tensor_parallel out" in problems(tensor_parallel=2)
    few = Measure(steps=4, warmup=2, save="asynchronous")
    assert problems(measure=few).endswith("measure.save_every=5 is above measure.steps=4, so none would begin")
