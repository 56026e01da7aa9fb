"""Verdicts on made-up steps: what counts as equal, near or wrong, and what is said to have gone wrong first."""

import math
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from tests.cells import cell
from zerobench.config import schema_memory, schema_training
from zerobench.config.cell import CellConfig
from zerobench.predict.estimate import estimate
from zerobench.sweep import parity
from zerobench.sweep.parity import CLOSE, DIFFERS, EQUAL, UNCHECKED


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
    assert said in found.words


def test_what_is_late_or_lossy_by_intent_is_judged_by_what_it_promises() -> None:
    late = cell("zero2", 2, offload=schema_memory.CpuOffload(delayed=True, delayed_after=1)).config
    found = verdict([5.0, 4.0, 3.5], [1.0, 0.9, 0.5], late)
    assert found.kind == EQUAL
    assert "over 2 steps, after which updates are late by intent" in found.words
    assert verdict([5.0, 4.1, 3.5], [1.0, 0.9, 0.5], late).kind == DIFFERS
    lossy = cell("zero3", 2, node_size=1, zeropp=schema_memory.AllOfZeropp()).config
    assert verdict([5.0, 4.01, 3.01], [1.0, 0.95, 0.75], lossy).kind == CLOSE
    assert verdict([5.0, 4.01, 3.01], [2.0, 1.9, 1.5], lossy).kind == DIFFERS


def test_norms_that_nobody_took_are_said() -> None:
    assert "losses alone: no norm was taken" in verdict(LOSSES, [None, None, None]).words
    one = parity.compare(cell("zero2", 2).config, steps([], []).reindex(columns=THEIRS.columns), DDP, THEIRS)
    assert one.kind == UNCHECKED


def test_what_a_trace_trained_counts_for_nothing() -> None:
    """Its pass comes last, and would take the place of the others'."""
    traced = steps([9.0, 9.0, 9.0], [9.0, 9.0, 9.0]).assign(mode="traced")
    mine = pd.concat([steps(LOSSES, NORMS), traced], ignore_index=True)
    assert parity.compare(cell("zero2", 2).config, mine, DDP, THEIRS).kind == EQUAL


def test_the_formula_stands_beside_the_prediction_before_a_run() -> None:
    """16ψ, 8ψ + 8ψ/N, 16ψ/N in fp32, and what is predicted is above."""
    for name, factor in (("ddp", 16), ("zero1", 12), ("zero3", 8)):
        found = estimate(cell(name, 2).config)
        assert found.floor_bytes == pytest.approx(factor * found.psi, rel=0.01)
        assert found.states_bytes >= found.floor_bytes


def test_compiled_runs_have_a_compiled_reference() -> None:
    """Fused operators round otherwise: under an eager one they would be said to train otherwise."""
    keys = [parity.training_key(cell(name, 2, compile=how).config) for how in ("none", "blocks") for name in PAIR]
    assert keys[0] == keys[1] != keys[2] == keys[3]


PAIR = ("ddp", "zero2")
