"""DDP with fp32 masters: equal to a loop by hand, clipped as the whole model, a step skipped by all ranks or none."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.cells import cell
from tests.ranks import run_ranks
from zerobench.config import schema_training
from zerobench.results import tables
from zerobench.strategies.ddp import DdpEngine, MasterDdpEngine
from zerobench.sweep import cell as cells
from zerobench.zero.precision import LossScaling

STEPS = 4
CLIP = 0.5
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.125, fused=True),
}
CASES = [
    (torch.bfloat16, "adamw", False, 1),
    (torch.bfloat16, "adamw", True, 2),
    (torch.bfloat16, "sgd", False, 2),
    (torch.bfloat16, "adagrad", False, 1),
    (torch.float16, "adamw", False, 1),
    (torch.float16, "sgd", True, 1),
]
"""Dtype, optimizer, whether clipped, micro-batches."""


class Net(nn.Module):
    """Sizes that tiles do not divide, a tied weight, a frozen one, a scalar, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(37, 19)
        self.inner = nn.Linear(19, 19)
        self.norm = nn.LayerNorm(19)
        self.frozen = nn.Linear(19, 19).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(19, 37, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens) + self.frozen(F.gelu(self.inner(self.embedding(tokens)))) * self.scale)
        return F.cross_entropy(self.head(x).float(), targets)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(37, (24,), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens, tokens.roll(1)


def engine_of(module: nn.Module, optimizer: str, **options: Any) -> DdpEngine:
    kind = MasterDdpEngine if module.inner.weight.dtype != torch.float32 else DdpEngine
    return kind(module, OPTIMIZERS[optimizer](module.parameters()), find_unused_parameters=True, **options)


def by_engine(rank: int, dtype: torch.dtype, optimizer: str, clip: bool, micro_batches: int, **options: Any) -> Any:
    module = Net().to(dtype)
    engine = engine_of(module, optimizer, **options)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(micro_batches):
            with engine.no_sync() if micro < micro_batches - 1 else nullcontext():
                loss = engine(*batch(rank, micro_batches * step + micro)) / micro_batches
                engine.backward(loss)
        if clip:
            norms.append(engine.clip_grad_norm_(CLIP).item())
        engine.step()
        losses.append(loss.item())
    return losses, norms, module.state_dict()


def by_hand(rank: int, n: int, dtype: torch.dtype, optimizer: str, clip: bool, micro_batches: int) -> Any:
    """Whole fp32 masters, whole fp32 gradients, torch's own clipping; gradients are averaged in the module's dtype."""
    module = Net().to(dtype)
    trained = [p for p in module.parameters() if p.requires_grad]
    masters = [nn.Parameter(p.detach().float()) for p in trained]
    chosen = OPTIMIZERS[optimizer](masters)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(micro_batches):
            loss = module(*batch(rank, micro_batches * step + micro)) / micro_batches
            loss.backward()
        for parameter, master in zip(trained, masters, strict=True):
            if parameter.grad is not None:
                mean = parameter.grad / n
                dist.all_reduce(mean)
                master.grad = mean.float()
            parameter.grad = None
        if clip:
            norms.append(nn.utils.clip_grad_norm_(masters, CLIP).item())
        chosen.step()
        with torch.no_grad():
            for parameter, master in zip(trained, masters, strict=True):
                parameter.copy_(master)
                master.grad = None
        losses.append(loss.item())
    return losses, norms, module.state_dict()


def compare_all(rank: int, n: int) -> dict[str, tuple[Any, Any]]:
    """Case -> what the engine and the loop by hand came to."""
    tiles = {"tile_bytes": 1024}  # they cut parameters
    return {str(case): (by_engine(rank, *case, **tiles), by_hand(rank, n, *case)) for case in CASES}


def clip_whole_model(rank: int, n: int, norm_type: float) -> tuple[Any, Any]:
    """fp32: the engine's norm and weights, and those of plain DDP with torch's function."""
    results = []
    for plain in (False, True):
        module = Net()
        engine = engine_of(module, "sgd")
        norms = []
        for step in range(STEPS):
            engine.backward(engine(*batch(rank, step)))
            if plain:
                norms.append(nn.utils.clip_grad_norm_(module.parameters(), CLIP, norm_type).item())
                assert sum(p.grad.abs().max() for p in module.parameters() if p.grad is not None) > 0
            else:
                norms.append(engine.clip_grad_norm_(CLIP, norm_type).item())
            engine.step()
        results.append((norms, module.state_dict()))
    return results[0], results[1]


def overflow(rank: int, n: int) -> dict[str, Any]:
    """fp16 under loss scaling; on the last rank, the second step's gradients are infinite."""
    module = Net().half()
    scaling = LossScaling(initial=64.0, growth=2.0, backoff=0.25, interval=2)
    engine = engine_of(module, "adamw", loss_scaling=scaling)
    scales, skipped, changed, norms = [], [], [], []
    for step in range(6):
        scales.append(float(engine.scaler.scale))
        before = module.inner.weight.detach().clone()
        loss = engine(*batch(rank, step))
        engine.backward(loss * float("inf") if step == 1 and rank == n - 1 else loss)
        norms.append(engine.clip_grad_norm_(1e9).item())
        engine.step()
        skipped.append(bool(engine.scaler.skipped))
        changed.append(not torch.equal(before, module.inner.weight))
    counts = {float(state["step"]) for state in engine.optimizer.state.values()}
    weights = module.state_dict()
    return {"scales": scales, "skipped": skipped, "changed": changed, "counts": counts, "norms": norms, "w": weights}


def test_masters_train_as_a_loop_by_hand() -> None:
    """At N = 2 to the bit without clipping; with it, the norm is summed in another order."""
    for mine in run_ranks(2, compare_all):
        for case, ((losses, norms, state), (hand_losses, hand_norms, hand_state)) in mine.items():
            assert losses[0] == hand_losses[0], case
            assert norms == pytest.approx(hand_norms, rel=1e-6), case
            if not norms:
                assert losses == hand_losses, case
                assert all(torch.equal(state[k], hand_state[k]) for k in state), case
            else:
                assert max(norms) > CLIP, case
                assert losses == pytest.approx(hand_losses, rel=1e-3), case


def test_one_rank_overflows_and_all_skip() -> None:
    first, second, third = run_ranks(3, overflow)
    assert first["skipped"] == [False, True, False, False, False, False]
    assert first["changed"] == [True, False, True, True, True, True]
    assert first["scales"] == [64, 64, 16, 16, 32, 32]  # backoff to a quarter, growth after two good steps
    assert first["counts"] == {5.0}
    assert not math.isfinite(first["norms"][1])
    for other in (second, third):
        assert all(torch.equal(first["w"][k], other["w"][k]) for k in first["w"])
        assert all(first[key] == other[key] for key in ("scales", "skipped", "changed", "counts"))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_fp32_is_clipped_by_torchs_own_function_to_the_bit(norm_type: float) -> None:
    for (norms, state), (plain_norms, plain_state) in run_ranks(2, clip_whole_model, norm_type):
        assert norms == plain_norms
        assert all(torch.equal(state[k], plain_state[k]) for k in state)


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
