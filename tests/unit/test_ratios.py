"""Ours against the peers: ratios, their words, and what becomes of what is not there."""

import pandas as pd
import pytest

from analysis import compare
from tests.made_up import results_of, run


def launches(strategy: str, steps: list[float], ranks: int = 2, minute: int = 0, **more):
    rows = [run(strategy, ranks, repeat=n, step=step, **more) for n, step in enumerate(steps)]
    for n, row in enumerate(rows):
        row.started = f"2026-01-01T10:{10 * n + minute:02}:00+00:00"
    return rows


def peaks(size: int) -> dict[str, int]:
    """By the allocator, in both passes; the ledger's own says nothing here."""
    return {"allocator_peak_bytes": size, "timed_allocator_peak_bytes": size + 100, "peak_bytes": 1}


def example() -> list:
    return [
        *launches("zero3", [0.07, 0.08, 0.09], minute=1, **peaks(100), loopback_bytes=600),
        *launches("fsdp2", [0.10, 0.10, 0.10], **peaks(200), loopback_bytes=800),
        *launches("ddp", [0.05, 0.06, 0.07], minute=2, **peaks(400), loopback_bytes=400),
        run("deepspeed_zero3", 2, "invalid", repeat=0),
    ]


@pytest.mark.slow
def test_a_ratio_is_that_of_paired_launches_with_its_interval() -> None:
    found = {(one.peer, one.metric): one for one in compare.ratios_of(results_of(example())) if one.pairs}
    step = found["fsdp2", "step_s"]
    assert step.ratio == pytest.approx((0.7 * 0.8 * 0.9) ** (1 / 3))
    assert step.low < 0.75 < 0.85 < step.high
    assert (step.pairs, step.interleaved, step.goal) == (3, True, 0.80)
    assert step.verdict == "met, within noise"
    assert found["fsdp2", "allocator_peak_bytes"].ratio == 0.5
    assert found["fsdp2", "timed_allocator_peak_bytes"].ratio == pytest.approx(2 / 3)
    assert found["fsdp2", "loopback_bytes"].ratio == 0.75
    assert found["fsdp2", "allocator_peak_bytes"].verdict == ""
    assert pd.isna(found["ddp", "step_s"].goal)


def test_larger_models_have_their_own_bound_and_other_ranks_none() -> None:
    (goal,) = [goal for goal in compare.GOALS if (goal.ours, goal.peer) == ("zero3", "fsdp2")]
    assert (goal.bound(10**7), goal.bound(5 * 10**7)) == (0.80, 0.70)
    rows = [*launches("zero3", [0.08], ranks=4), *launches("fsdp2", [0.1], ranks=4)]
    (step,) = [one for one in compare.ratios_of(results_of(rows)) if one.metric == "step_s" and one.peer == "fsdp2"]
    assert pd.isna(step.goal)
    assert step.verdict == ""
