"""DDP as a baseline: clipped as the whole model, with fp32 masters a step skipped by all ranks or none, its bytes."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests import zoo
from tests.distributed.training import assert_equal, assert_same
from tests.distributed.variants import measured
from tests.ranks import on_ranks, run_ranks
from zerobench.config import schema_training
from zerobench.strategies.ddp import DdpEngine, MasterDdpEngine
from zerobench.zero.precision import LossScaling

CLIP = 0.5


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@on_ranks(2)
def test_fp32_is_clipped_by_torchs_own_function_to_the_bit(rank: int, n: int, norm_type: float) -> None:
    results = []
    for plain in (False, True):
        module = zoo.build("tied")
        engine = DdpEngine(module, zoo.OPTIMIZERS["sgd_momentum"](module.parameters()))
        norms = []
        for step in range(3):
            engine.backward(engine(*zoo.tokens(rank, n, step)))
            if plain:
                norms.append(nn.utils.clip_grad_norm_(module.parameters(), CLIP, norm_type).item())
                assert sum(p.grad.abs().max() for p in module.parameters() if p.grad is not None) > 0
            else:
                norms.append(engine.clip_grad_norm_(CLIP, norm_type).item())
            engine.step()
        results.append((norms, module.state_dict()))
    assert_same(*results)


def overflow(rank: int, n: int) -> dict[str, Any]:
    """fp16 under loss scaling; on the last rank, the second step's gradients are infinite."""
    module = zoo.build("tied").half()
    weight = module.blocks[0].up.weight
    scaling = LossScaling(initial=64.0, growth=2.0, backoff=0.25, interval=2)
    optimizer = zoo.OPTIMIZERS["adamw"](module.parameters())
    engine = MasterDdpEngine(module, optimizer, loss_scaling=scaling)
    scales, skipped, changed, norms = [], [], [], []
    for step in range(6):
        scales.append(float(engine.scaler.scale))
        before = weight.detach().clone()
        loss = engine(*zoo.tokens(rank, n, step))
        engine.backward(loss * float("inf") if step == 1 and rank == n - 1 else loss)
        norms.append(engine.clip_grad_norm_(1e9).item())
        engine.step()
        skipped.append(bool(engine.scaler.skipped))
        changed.append(not torch.equal(before, weight))
    counts = {float(state["step"]) for state in engine.optimizer.state.values()}
    weights = module.state_dict()
    return {"scales": scales, "skipped": skipped, "changed": changed, "counts": counts, "norms": norms, "w": weights}


def test_one_rank_overflows_and_all_skip() -> None:
    first, second, third = run_ranks(3, overflow)
    assert first["skipped"] == [False, True, False, False, False, False]
    assert first["changed"] == [True, False, True, True, True, True]
    assert first["scales"] == [64, 64, 16, 16, 32, 32]  # backoff to a quarter, growth after two good steps
    assert first["counts"] == {5.0}
    assert not math.isfinite(first["norms"][1])
    for other in (second, third):
        assert_equal(other["w"], first["w"])
        assert all(first[key] == other[key] for key in ("scales", "skipped", "changed", "counts"))


@pytest.mark.parametrize(
    ("section", "n", "accumulation"),
    [
        pytest.param(schema_training.Bf16(), 2, 1, marks=pytest.mark.thorough),
        (schema_training.Bf16(tile_bytes=4096), 2, 2),
        pytest.param(schema_training.Fp16(initial_scale=1024.0), 3, 1, marks=pytest.mark.thorough),
    ],
)
def test_ddp_holds_the_papers_sixteen_bytes_a_parameter(tmp_path, section, n: int, accumulation: int) -> None:
    """2ψ parameters, 2ψ gradients, 4ψ masters, 8ψ Adam states (and 2ψ of unsynced gradients where it accumulates)."""
    row, results = measured(tmp_path, "ddp", n, "mlp", precision=section, accumulation=accumulation, clip=1.0)
    assert row.passes_agree
    assert row.max_parameters_bytes == 2 * row.psi
    assert row.max_master_bytes == 4 * row.psi
    assert row.floor_states_bytes == 16 * row.psi
    assert row.max_optimizer_bytes == pytest.approx(8 * row.psi, rel=0.01)
    assert row.states_bytes == pytest.approx(row.predicted_states_bytes, rel=0.01)
    assert row.volume_psi == row.predicted_volume_psi == 2
    assert row.wire_bytes == pytest.approx(2 * row.psi * 2 * (n - 1) / n, abs=1)
    tile = min(section.tile_bytes or 4 * 2**20, 4 * row.psi)
    assert row.max_gradients_bytes <= 2 * row.psi * (1 + (accumulation > 1)) + max(tile, 2 * 256 * 70 * 2)
    steps = results.steps
    assert (steps.clip_norm > 0).all()
    accounted = steps[steps["mode"] == "accounted"]
    assert (abs(accounted.grad_norm / accounted.clip_norm - 1) < 1e-6).all()
    assert row.grad_norm_last == steps.grad_norm.iloc[-1]
    assert set(steps.loss_scale) == {getattr(section, "initial_scale", 1.0)}
    assert not steps.skipped.any()
    assert row.skipped_steps == 0
