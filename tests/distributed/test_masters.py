"""DDP with fp32 masters: equal to a loop by hand, clipped as the whole model, a step skipped by all ranks or none."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cells import cell
from tests.distributed import masters
from tests.ranks import run_ranks
from zerobench.config import schema_training
from zerobench.results import tables
from zerobench.sweep import cell as cells


def test_masters_train_as_a_loop_by_hand() -> None:
    """At N = 2 to the bit without clipping; with it, the norm is summed in another order."""
    for mine in run_ranks(2, masters.compare_all):
        for case, ((losses, norms, state), (hand_losses, hand_norms, hand_state)) in mine.items():
            assert losses[0] == hand_losses[0], case
            assert norms == pytest.approx(hand_norms, rel=1e-6), case
            if not norms:
                assert losses == hand_losses, case
                assert all(torch.equal(state[k], hand_state[k]) for k in state), case
            else:
                assert max(norms) > masters.CLIP, case
                assert losses == pytest.approx(hand_losses, rel=1e-3), case


def test_one_rank_overflows_and_all_skip() -> None:
    first, second, third = run_ranks(3, masters.overflow)
    assert first["skipped"] == [False, True, False, False, False, False]
    assert first["changed"] == [True, False, True, True, True, True]
    assert first["scales"] == [64, 64, 16, 16, 32, 32]  # backoff to a quarter, growth after two good steps
    assert first["counts"] == {5.0}
    assert not math.isfinite(first["norms"][1])
    for other in (second, third):
        assert all(torch.equal(first["w"][k], other["w"][k]) for k in first["w"])
        assert all(first[key] == other[key] for key in ("scales", "skipped", "changed", "counts"))


def test_a_loss_scale_leaves_norms_and_training_as_they_are() -> None:
    for (losses, norms, _), (plain_losses, plain_norms, _) in run_ranks(1, masters.scaled_and_not)[0]:
        assert losses == pytest.approx(plain_losses, rel=1e-3)
        assert norms == pytest.approx(plain_norms, rel=1e-2)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_fp32_is_clipped_by_torchs_own_function_to_the_bit(norm_type: float) -> None:
    for (norms, state), (plain_norms, plain_state) in run_ranks(2, masters.clip_whole_model, norm_type):
        assert norms == plain_norms
        assert all(torch.equal(state[k], plain_state[k]) for k in state)


def test_parameters_in_fp32_train_whatever_their_strides() -> None:
    assert run_ranks(1, masters.strided_wide) == [[True, True]]


def test_small_updates_add_up_in_masters_alone() -> None:
    with_masters, without = run_ranks(1, masters.masters_matter)[0]
    assert with_masters > 2 * without


@pytest.mark.parametrize(
    ("section", "n", "accumulation"),
    [
        (schema_training.Bf16(), 2, 1),
        (schema_training.Bf16(tile_bytes=4096), 2, 2),
        (schema_training.Fp16(initial_scale=1024.0), 3, 1),
    ],
)
def test_ddp_holds_the_papers_sixteen_bytes_a_parameter(tmp_path, section, n: int, accumulation: int) -> None:
    """2ψ parameters, 2ψ gradients, 4ψ masters, 8ψ Adam states (and 2ψ of unsynced gradients where it accumulates)."""
    more = {"precision": section, "accumulation": accumulation, "clip": 1.0, "results_dir": str(tmp_path)}
    row = cells.run_cell(cell("ddp", n, "mlp", **more), lambda _: None)
    assert row.status == "ok", row.reason
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
    steps = tables.load(tmp_path / row.run_id).steps
    assert (steps.clip_norm > 0).all()
    accounted = steps[steps["mode"] == "accounted"]
    assert (abs(accounted.grad_norm / accounted.clip_norm - 1) < 1e-6).all()
    assert row.grad_norm_last == steps.grad_norm.iloc[-1]
    assert set(steps.loss_scale) == {getattr(section, "initial_scale", 1.0)}
    assert not steps.skipped.any()
    assert row.skipped_steps == 0
