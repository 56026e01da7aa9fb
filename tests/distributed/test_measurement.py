"""The instrument against what is known: bytes of DDP and of the stages, volumes by formula, passes that agree."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.cells import cell
from tests.distributed.variants import account, measured
from zerobench.config.schema import Measure
from zerobench.config.schema_training import Sgd
from zerobench.probes.traced_pass import overlaps, read_trace
from zerobench.records import CATEGORIES, COLLECTIVES, STATES

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


ACCOUNTED = Measure(steps=2, warmup=2, passes="accounted")


SIZES = {"tiny": 1, "words": 2, "odd": 3, "checkpointed": 2, "mlp": 4, "gaps": 3}
"""Model -> ranks."""

SHOWN = {("ddp", "words"), ("zero1", "words"), ("zero2", "tiny"), ("zero2", "odd"), ("zero3", "gaps")}
"""The strategies and models of every run."""


def repeated(row: tuple[str, ...], is_repeated: bool) -> Any:
    return pytest.param(*row, marks=pytest.mark.thorough if is_repeated else ())


@pytest.mark.parametrize(
    ("strategy", "model", "n"),
    [
        repeated((strategy, model, n), (strategy, model) not in SHOWN)
        for strategy in STRATEGIES
        for model, n in (SIZES.items() if strategy != "ddp" else list(SIZES.items())[:3])
    ],
)
def test_bytes_and_volumes_are_those_of_the_formulas(tmp_path, strategy: str, model: str, n: int) -> None:
    more: dict[str, Any] = {} if (strategy, model) == ("ddp", "words") else {"measure": ACCOUNTED}
    if model == "gaps":
        more["bucket_bytes"] = 5000
    row, results = measured(tmp_path, strategy, n, model, **more)
    assert row.passes_agree is (None if more else True)
    # states: floor and what is in flight, within 1 %
    assert row.states_bytes == pytest.approx(row.predicted_states_bytes, rel=0.01)
    assert row.floor_states_bytes <= row.states_bytes
    if strategy == "ddp":  # built, it holds parameters and buckets; nothing lies in a thread of gloo's for a while
        built = results.memory[results.memory.phase == "init"].groupby("category").max_bytes
        assert built.max()["communication"] == 0
        assert built.min()["total"] == built.max()["total"]
    by_category = results.memory[results.memory.phase == "step"].dropna(subset="predicted_bytes")
    for category, part in by_category.groupby("category"):
        slack = 0.02 * row.states_bytes  # a bias's gradient beside its weight's
        assert part.max_bytes.max() == pytest.approx(part.predicted_bytes.max(), abs=slack), category
    assert row.max_inputs_bytes >= 2 * 4 * 32 * 8  # tokens and targets
    # parts at the peak add up to the peak, on every rank and in every phase
    for _, part in results.memory.groupby(["rank", "phase"]):
        by = part.set_index("category")
        assert by.loc[list(CATEGORIES), "at_peak_bytes"].sum() == by.loc["total", "at_peak_bytes"]
        assert by.loc[list(STATES), "at_states_peak_bytes"].sum() == by.loc["states", "max_bytes"]
        assert (by["max_bytes"] >= by["at_peak_bytes"]).all()
    assert sum(asdict(row)[f"peak_{category}_bytes"] for category in CATEGORIES) == row.peak_bytes
    # what the engine adds to the model's own activations: nothing
    assert row.max_activations_bytes == row.predicted_activations_bytes
    # the allocator has seen what the ledger has, and scratch of kernels: recomputed, a peak is inside of attention's
    if row.allocator_witness == "hook":
        scratch = 16 * 1024 if row.checkpointing else 64
        assert 0 <= row.outside_ledger_bytes <= scratch
        assert row.allocator_peak_bytes == pytest.approx(row.peak_bytes, abs=scratch)
    check_timeline(row, results)
    # traffic: to the element
    assert row.volume_psi == row.predicted_volume_psi
    assert results.traffic.known.all()
    if n > 1 and strategy != "ddp":
        assert row.wire_bytes == pytest.approx(4 * row.volume_psi * row.psi * (n - 1) / n, rel=1e-9)
        kinds = set(results.traffic[~results.traffic.control].collective)
        assert kinds == {"reduce_scatter", "all_gather"}


@pytest.mark.parametrize(
    ("strategy", "n"), [*(repeated(row, True) for row in (("ddp", 2), ("zero1", 3), ("zero3", 3))), ("zero2", 2)]
)
def test_accumulation_is_counted_and_changes_nothing_else(tmp_path, strategy: str, n: int) -> None:
    """Three micro-batches a step: volumes to the element, states as predicted, the loss of one large batch."""
    whole, _ = measured(tmp_path, strategy, n, micro_batch=6, measure=ACCOUNTED)
    row, results = measured(tmp_path, strategy, n, micro_batch=2, accumulation=3)
    assert (row.batch, whole.batch) == (6 * n, 6 * n)
    assert row.passes_agree
    assert row.states_bytes == pytest.approx(row.predicted_states_bytes, rel=0.01)
    assert row.volume_psi == row.predicted_volume_psi
    assert row.loss_last == pytest.approx(whole.loss_last, rel=1e-6)
    assert row.max_activations_bytes < whole.max_activations_bytes
    factor = {"ddp": 1, "zero1": 1, "zero2": 2, "zero3": 3}[strategy]
    assert row.volume_psi == pytest.approx(factor * whole.volume_psi, rel=1e-9)
    parts = [getattr(row, f"volume_{kind}_psi") for kind in COLLECTIVES]
    assert sum(parts) == pytest.approx(row.volume_psi)
    assert parts[-1] == 0
    steps = results.steps[(results.steps["mode"] == "timed") & ~results.steps.warmup]
    assert (steps.forward_s + steps.backward_s + steps.update_s <= steps.seconds).all()


def check_timeline(row, results) -> None:
    for _, line in results.timeline.groupby("rank"):
        total = line[[f"{category}_bytes" for category in CATEGORIES]].sum(axis=1)
        assert list(line.phase.drop_duplicates()) == ["data", "forward", "backward", "update"]
        assert total.max() <= row.peak_bytes
        assert line.seconds.is_monotonic_increasing
        assert len(line) <= 2 * 400
    fullest = results.timeline[[f"{category}_bytes" for category in CATEGORIES]].sum(axis=1).max()
    assert fullest == pytest.approx(row.peak_bytes, rel=0.001)


def test_ddp_holds_sixteen_bytes_a_parameter(tmp_path) -> None:
    """The probe is trusted on what is known: 4ψ parameters, 4ψ gradients, 8ψ Adam states, volume 2ψ."""
    row, results = measured(tmp_path, "ddp", 2, "mlp", measure=ACCOUNTED)
    tensors = 2 + 2 * 5 + 1
    assert row.max_parameters_bytes == 4 * row.psi
    assert row.max_optimizer_bytes == 8 * row.psi + 4 * tensors
    assert 4 * row.psi < row.max_gradients_bytes <= 4 * row.psi + 4 * 2 * 256 * 70
    assert row.max_communication_bytes == row.max_master_bytes == 0
    assert row.volume_psi == 2.0
    assert row.payload_bytes == 4 * row.psi
    assert row.wire_bytes == 4 * row.psi
    assert row.control_bytes == 0
    assert set(results.traffic.phase) == {"backward"}


def test_optimizers_without_states_are_counted_so(tmp_path) -> None:
    row, _ = measured(tmp_path, "zero2", 2, optimizer=Sgd(), measure=ACCOUNTED)
    assert row.max_optimizer_bytes == 0
    assert row.states_bytes == pytest.approx(row.predicted_states_bytes, rel=0.01)


@pytest.mark.thorough
def test_accounting_repeats_to_the_byte(tmp_path) -> None:
    """Two runs of one cell: everything but time is equal."""
    runs = [measured(tmp_path, "zero3", 2, measure=ACCOUNTED) for _ in range(2)]
    check_timeline(*runs[0])
    first, second = (asdict(row) for row, _ in runs)
    rough = ("resident_bytes", "loopback_bytes", "timed_allocator_peak_bytes")
    exact = [k for k in first if k.endswith(("_bytes", "_psi")) and k not in rough]
    assert {k: first[k] for k in exact} == {k: second[k] for k in exact}
    assert first["loss_last"] == second["loss_last"]
    assert first["run_id"] != second["run_id"]


TRACED = Measure(steps=3, warmup=2, trace=True)


def test_a_third_pass_tells_what_is_exposed(tmp_path: Path) -> None:
    row, results = measured(tmp_path, "zero2", 2, measure=TRACED)
    assert row.passes_agree
    assert 0 < row.exposed_s <= row.communication_s <= row.traced_step_s
    assert row.overlap == 1 - row.exposed_s / row.communication_s
    steps = results.steps[results.steps["mode"] == "traced"]
    after_warmup = steps[~steps["warmup"]]
    assert len(steps) == 2 * 5
    assert (after_warmup["exposed_s"] <= after_warmup["communication_s"]).all()
    assert (after_warmup["communication_s"] <= after_warmup["seconds"]).all()
    assert steps[steps["warmup"]]["communication_s"].isna().all()
    assert results.steps[results.steps["mode"] != "traced"]["communication_s"].isna().all()
    # the trace that is kept says the same
    kept = overlaps(read_trace(tmp_path / row.run_id / "traces/rank0.json.gz"), "cpu")
    pd.testing.assert_series_equal(
        pd.Series([one.exposed_s for one in kept]), after_warmup[after_warmup["rank"] == 0]["exposed_s"],
        check_index=False, check_names=False,
    )  # fmt: skip
    assert [path.name for path in (tmp_path / row.run_id / "traces").iterdir()] == ["rank0.json.gz"]


@pytest.mark.thorough
def test_every_strategy_is_measured_alike(tmp_path: Path) -> None:
    """torch's DDP, a peer and ours in one launch; what one collective of all gradients takes, none can do without."""
    configs = [cell(name, 2, "million", measure=TRACED).config for name in ("ddp", "fsdp2", "zero1", "zero3")]
    for records in account(configs, tmp_path, "traced"):
        for record in records:
            after_warmup = [step for step in record.steps if not step.warmup]
            assert len(after_warmup) == 3
            for one in after_warmup:
                assert 0 < one.exposed_s <= one.communication_s <= one.seconds
