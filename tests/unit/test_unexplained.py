"""Sentences on a finished run: a figure off its prediction, witnesses that disagree, and verdicts on its training."""

import math
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from tests.cells import cell
from zerobench.config import schema_memory, schema_training
from zerobench.config.cell import CellConfig
from zerobench.predict.estimate import estimate
from zerobench.predict.unexplained import Accounted, Expected, unexplained
from zerobench.records import STATES, LineRow, MemoryRow
from zerobench.sweep import parity
from zerobench.sweep.cell import new_row
from zerobench.sweep.parity import CLOSE, DIFFERS, EQUAL, UNCHECKED
from zerobench.theory.replay.states import Prediction

MIB = 2**20
GROWN = LineRow(0, "growth", "activations", "blocks.0", "model.py:12 in forward", MIB, 1)


def said_of(
    strategy: str = "zero2", memory: list[MemoryRow] | None = None, expected: Expected | None = None,
    aside: bool = False, slots: bool = False, **columns: Any,
) -> str:  # fmt: skip
    row = new_row(cell(strategy, 2))
    row.predicted_states_bytes = row.states_bytes = MIB if strategy == "zero2" else None
    row.allocator_peak_bytes, row.max_inputs_bytes = 10 * MIB, 2048
    for name, value in columns.items():
        assert hasattr(row, name)
        setattr(row, name, value)
    return unexplained(row, Accounted(memory or [], [], 2, "", [GROWN], aside, slots), expected or Expected())


@pytest.mark.parametrize("strategy", ["zero2", "zero_redundancy"])
@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"outside_ledger_bytes": -60_000}, ""),
        (
            {"outside_ledger_bytes": -5_300_000},
            "outside the ledger: -5,300,000 B, which cannot be: the ledger counts memory that the allocator does not"
            " hold, so it has missed a free",
        ),
        ({"outside_ledger_bytes": -5_300_000, "max_inputs_bytes": 6 * MIB}, ""),  # batches of numpy's arrays
        ({"timed_allocator_peak_bytes": 10 * MIB + 60_000}, ""),
        ({"timed_allocator_peak_bytes": 2 * MIB}, ""),
        (
            {"timed_allocator_peak_bytes": 14 * MIB},
            "timed pass: 4,194,304 B above the allocator's peak of 10,485,760 B in the accounted pass",
        ),
        ({"growth_bytes": 4}, ""),
        (
            {"growth_bytes": MIB},
            "activations: 1,048,576 B more after the measured steps than before them, most of it made at"
            " model.py:12 in forward",
        ),
    ],
)
def test_witnesses_that_disagree_are_named_for_peers_too(strategy: str, columns: dict[str, int], sentence: str) -> None:
    assert said_of(strategy, **columns) == sentence


def test_what_outlives_a_step_is_named_unless_an_arena_keeps_it() -> None:
    assert said_of(kept_bytes=MIB).startswith("kept from step to step: 1,048,576 B, ")
    assert said_of(kept_bytes=MIB, slots=True) == ""


def test_a_ledger_that_predictions_confirm_blames_the_allocator() -> None:
    said = said_of(outside_ledger_bytes=-5_300_000, expected=Expected(Prediction(MIB, {}, {})))
    assert said.endswith("the ledger is as predicted, so the allocator's peak was reset, or not read in every phase")
    said = said_of(outside_ledger_bytes=-5_300_000, states_bytes=2 * MIB, expected=Expected(Prediction(MIB, {}, {})))
    assert said.endswith("so it has missed a free")


def test_a_figure_of_rank_0_alone_is_named() -> None:
    memory = [
        MemoryRow(rank, "step", name, size, size, size)
        for rank in (0, 1)
        for name, size in (("total", (5 + rank) * MIB), ("states", (3 + rank) * MIB))
    ]
    most = {"states_bytes": 4 * MIB, "predicted_states_bytes": 4 * MIB}
    assert said_of(memory=memory, peak_bytes=6 * MIB, **most) == ""
    said = said_of(memory=memory, peak_bytes=5 * MIB, **most)
    assert said == "peak: 5,242,880 B in the row, and 6,291,456 B on rank 1: not of all ranks"


def test_libraries_of_a_peer_may_take_memory_beside_the_ledger_and_the_accounted_pass() -> None:
    columns = {"outside_ledger_bytes": MIB, "timed_allocator_peak_bytes": 10 * MIB + 400 * 1024}
    assert said_of("zero_redundancy", **columns) == ""
    assert said_of("zero2", **columns).count(";") == 1


def test_a_deviation_of_the_states_is_named_where_their_sum_is_largest_on_that_rank() -> None:
    """Parameters that stay raise the sum and not their own maximum; another rank has fewer states, and other ones."""

    def rows(rank: int, at_most: list[int], highest: list[int]) -> list[MemoryRow]:
        parts = zip(STATES, at_most, highest, strict=True)
        own = [MemoryRow(rank, "step", name, 0, size, most, tier="device") for name, size, most in parts]
        return [*own, MemoryRow(rank, "step", "states", 0, sum(at_most), sum(at_most))]

    expected = dict(zip(STATES, [20, 30, 0, 80, 40], strict=True))
    fullest = rows(1, [60, 30, 0, 80, 38], [60, 30, 0, 80, 40])
    other = rows(0, [20, 30, 0, 10, 45], [60, 30, 0, 10, 45])
    prediction = Prediction(170, dict(zip(STATES, [60, 30, 0, 80, 40], strict=True)), expected)
    said = said_of(
        memory=[*fullest, *other], expected=Expected(prediction), states_bytes=208, predicted_states_bytes=170
    )
    assert said == "parameters: 38 B above the prediction of 170 B in the states"
    less = rows(0, [20, 30, 0, 80, 10], [60, 30, 0, 80, 40])
    said = said_of(memory=less, expected=Expected(prediction), states_bytes=140, predicted_states_bytes=170)
    assert said == "communication: 30 B below the prediction of 170 B in the states"


def steps(losses: list[float], norms: list[float | None], ranks: int = 2) -> pd.DataFrame:
    rows = [
        {"rank": rank, "mode": "accounted", "step": step, "loss": loss + rank, "grad_norm": norm}
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True))
        for rank in range(ranks)
    ]
    return pd.DataFrame(rows)


DDP = cell("ddp", 2).config
LOSSES, NORMS = [5.0, 4.0, 3.0], [1.0, 0.9, 0.8]
THEIRS = steps(LOSSES, NORMS)


def verdict(losses: list[float], norms: list[Any], config: CellConfig | None = None) -> parity.Verdict:
    return parity.compare(config or cell("zero2", 2).config, steps(losses, norms), DDP, THEIRS)


def test_equal_is_to_the_bit_on_two_ranks_and_near_is_not() -> None:
    assert verdict(LOSSES, NORMS).kind == EQUAL
    near = [5.0, math.nextafter(4.0, 5), 3.0]
    assert verdict(near, NORMS).kind == DIFFERS
    for more in (
        {"strategy": "fsdp2"},
        {"shard_group": 1},
        {"accumulation": 2, "micro_batch": 2},
        {"optimizer": schema_training.Sgd()},
    ):
        name = more.pop("strategy", "zero2")
        config = cell(name, 2, **more).config
        assert parity.compare(config, steps(near, NORMS), DDP, THEIRS).kind == CLOSE, more
    four = cell("zero2", 4).config
    assert parity.compare(four, steps(near, NORMS), replace(DDP, world_size=4), THEIRS).kind == CLOSE
    assert parity.compare(four, steps([5.0, 4.001, 3.0], NORMS), replace(DDP, world_size=4), THEIRS).kind == DIFFERS


@pytest.mark.parametrize(
    ("losses", "norms", "said"),
    [
        ([5.5, 4.0, 3.0], NORMS, "the loss of rank 0 at step 0 is 5.5 and DDP's 5: there was no update yet"),
        (LOSSES, [2.0, 1.8, 1.6], "2 times DDP's, as a sum over the 2 ranks"),
        (LOSSES, [0.5, 0.45, 0.4], "0.5 times DDP's, as after a second division by the 2 ranks"),
        (
            LOSSES,
            [1.0, 0.7, 0.8],
            "gradients: their norm at step 1 is 0.7, 0.777778 times DDP's: the gradients of a rank or of a bucket "
            "are missing",
        ),
        (LOSSES, [1.0, math.inf, 0.8], "their norm at step 1 is inf, DDP's 0.9"),
        ([5.0, 4.5, 3.0], NORMS, "after gradient norms that agree: check the update of step 0"),
    ],
)
def test_what_differs_first_is_to_blame(losses: list[float], norms: list[float], said: str) -> None:
    found = verdict(losses, norms)
    assert found.kind == DIFFERS
    assert said in found.message


def test_what_is_late_or_lossy_by_intent_is_judged_by_what_it_promises() -> None:
    late = cell("zero2", 2, offload=schema_memory.CpuOffload(delayed=True, delayed_after=1)).config
    found = verdict([5.0, 4.0, 3.5], [1.0, 0.9, 0.5], late)
    assert found.kind == EQUAL
    assert "over 2 steps, after which updates are delayed by design" in found.message
    assert verdict([5.0, 4.1, 3.5], [1.0, 0.9, 0.5], late).kind == DIFFERS
    lossy = cell("zero3", 2, node_size=1, zeropp=schema_memory.AllOfZeropp()).config
    assert verdict([5.0, 4.01, 3.01], [1.0, 0.95, 0.75], lossy).kind == CLOSE
    assert verdict([5.0, 4.01, 3.01], [2.0, 1.9, 1.5], lossy).kind == DIFFERS


def test_norms_that_nobody_took_are_said() -> None:
    assert "losses alone: no norm was taken" in verdict(LOSSES, [None, None, None]).message
    one = parity.compare(cell("zero2", 2).config, steps([], []).reindex(columns=THEIRS.columns), DDP, THEIRS)
    assert one.kind == UNCHECKED


def test_the_formula_stands_beside_the_prediction_before_a_run() -> None:
    """16ψ, 8ψ + 8ψ/N, 16ψ/N in fp32, and what is predicted is above."""
    for name, factor in (("ddp", 16), ("zero1", 12), ("zero3", 8)):
        found = estimate(cell(name, 2).config)
        assert found.floor_bytes == pytest.approx(factor * found.psi, rel=0.01)
        assert found.states_bytes >= found.floor_bytes
