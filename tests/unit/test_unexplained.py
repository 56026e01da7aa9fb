"""Sentences on a finished run: a figure that differs from its prediction, and witnesses that disagree."""

from typing import Any

import pytest

from tests.cells import cell
from zerobench.predict.unexplained import Accounted, Expected, unexplained
from zerobench.records import STATES, LineRow, MemoryRow
from zerobench.sweep.cell import _blank_row
from zerobench.theory.replay.states import Prediction

MIB = 2**20
GROWN = LineRow(0, "growth", "activations", "blocks.0", "model.py:12 in forward", MIB, 1)


def said_of(
    strategy: str = "zero2", memory: list[MemoryRow] | None = None, expected: Expected | None = None, **columns: Any
) -> str:
    row = _blank_row(cell(strategy, 2))
    row.predicted_states_bytes = row.states_bytes = MIB if strategy == "zero2" else None
    row.allocator_peak_bytes, row.max_inputs_bytes = 10 * MIB, 2048
    for name, value in columns.items():
        assert hasattr(row, name)
        setattr(row, name, value)
    return unexplained(row, Accounted(memory or [], [], 2, "", [GROWN]), expected or Expected())


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


def test_kernels_scratch_is_larger_in_half_precision() -> None:
    for precision, most in (("fp32", 105_000), ("bf16", 524_288)):
        assert said_of(outside_ledger_bytes=most - 200, precision=precision) == ""
        assert "of kernels or other threads" in said_of(outside_ledger_bytes=most + 200, precision=precision)


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
