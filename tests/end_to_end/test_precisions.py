"""Mixed precision, clipping and loss scaling as a user types them, under every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

import zerobench
from tests.end_to_end.command import SMALL
from tests.end_to_end.command import zerobench as run

ALL = "strategy=ddp,zero1,zero2,zero3,megatron"


@pytest.mark.thorough
def test_half_precision_clipped_and_accumulated_trains_alike_under_every_strategy(tmp_path: Path) -> None:
    more = ["precision=bf16", "clip=0.5", "accumulation=2", "optimizer=adagrad", "world_size=2"]
    done = run("-m", ALL, *more, *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    results = zerobench.load(tmp_path / "results/runs")
    runs = results.runs.set_index("strategy")
    assert runs.passes_agree.all()
    assert set(runs.optimizer) == {"adagrad/fused, clipped at 0.5"}
    assert dict(runs.precision.items()) == dict.fromkeys(runs.index, "bf16") | {"megatron": "bf16, gradient_dtype=fp32"}
    ddp = runs.loc["ddp"]
    assert runs.loss_last.to_list() == pytest.approx([ddp.loss_last] * 5, rel=1e-2)
    assert runs.grad_norm_last.to_list() == pytest.approx([ddp.grad_norm_last] * 5, rel=2e-2)
    # masters are whole under DDP and shared elsewhere
    assert ddp.max_master_bytes == 4 * ddp.psi
    others = runs.drop(index="ddp")
    assert others.max_master_bytes.to_list() == pytest.approx([2 * ddp.psi] * 4, rel=0.1)
    assert (results.steps.clip_norm > 0).all()
    assert (results.steps.grad_norm > 0).any()
    assert set(runs.training) == {"reference", "close"}
    shown = run("show", "zero2 gpt_tiny N=2 b=16 a=2 bf16 adagrad", cwd=tmp_path).stdout
    assert "bf16, adagrad (lr=0.01," in shown
    assert "clipped at 0.5 (norm 2)" in shown
    assert "gradient norm" in shown


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
