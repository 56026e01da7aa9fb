"""Loss scaling as a user types it: an overflow is skipped and told."""

from __future__ import annotations

from pathlib import Path

import pytest

import zerobench
from tests.end_to_end.command import SMALL
from tests.end_to_end.command import zerobench as run


@pytest.mark.thorough
def test_an_overflow_is_skipped_and_told(tmp_path: Path) -> None:
    """A scale of 1e30 overflows in every step; one that halves to what fits goes on from there."""
    scale = ["precision.initial_scale=1e30", "precision.backoff=1e-6", "precision.minimum_scale=64"]
    done = run("-m", "strategy=ddp,zero2", "precision=fp16", *scale, "world_size=2", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    results = zerobench.load(tmp_path / "results/runs")
    for run_id, steps in results.steps.groupby("run_id"):
        one = steps[(steps["mode"] == "timed") & (steps["rank"] == 0)]
        row = results.runs.set_index("run_id").loc[run_id]
        assert list(one.loss_scale[:4]) == pytest.approx([1e30, 1e24, 1e18, 1e12])
        assert one.skipped[:4].all()
        assert row.skipped_steps == one.skipped.sum() >= 4
        assert row.loss_scale_last == one.loss_scale.iloc[-1]
    shown = run("show", "ddp gpt_tiny N=2 b=8 fp16", cwd=tmp_path).stdout
    assert "overflowed, skipped" in shown
