"""Options of a caller, against torch DDP: modes, kept units, gathers that overlap, clipping, dtypes."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests import zoo
from tests.ranks import run_ranks
from zerobench.strategies.ddp import MasterDdpEngine
from zerobench.zero import STAGES, LossScaling, initialize

STEPS = 2
ZERO = ("zero1", "zero2", "zero3")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    return zoo.build("tied").to(dtype)


def ddp(rank: int, n: int, dtype: torch.dtype, max_norm: float | None = None, norm_type: float = 2.0, scale: float = 1):
    """torch DDP, with fp32 masters where the model is half, written out."""
    model = model_of(dtype)
    wrapped = DistributedDataParallel(model)
    half = dtype != torch.float32
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()] if half else list(model.parameters())
    optimizer = adamw(masters)
    losses, norms = [], []
    for step in range(STEPS):
        loss = wrapped(*zoo.tokens(rank, n, step))
        (loss * scale).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            if half:
                master.grad = p.grad.float() / scale
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(masters, max_norm, norm_type).item())
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
                p.grad = None if half else p.grad
        wrapped.zero_grad()
        losses.append(loss.item())
    return losses, norms, {k: v.clone() for k, v in model.state_dict().items()}


def ours(rank: int, n: int, strategy: str, dtype: torch.dtype, max_norm: float | None = None, norm_type: float = 2.0,
         **options: Any):  # fmt: skip
    model = model_of(dtype)
    if strategy == "ddp":
        engine: Any = MasterDdpEngine(model, adamw(model.parameters()), **options)
    else:
        engine = initialize(model, adamw(model.parameters()), strategy, bucket_bytes=4096, **options)
    losses, norms = [], []
    for step in range(STEPS):
        loss = engine(*zoo.tokens(rank, n, step))
        engine.backward(loss)
        if max_norm is not None:
            norms.append(engine.clip_grad_norm_(max_norm, norm_type).item())
        engine.step()
        losses.append(loss.item())
    return losses, norms, model.state_dict() if strategy == "ddp" else engine.full_state_dict()


def same(mine: Any, oracle: Any, exact: bool, tolerance: float = 2e-4) -> list[str]:
    """Describes the difference."""
    wrong = []
    if exact and mine[0] != oracle[0]:
        wrong.append(f"losses {mine[0]} {oracle[0]}")
    for a, b in zip(mine[0], oracle[0], strict=True):
        if not math.isclose(a, b, rel_tol=tolerance):
            wrong.append(f"loss {a} {b}")
    for a, b in zip(mine[1], oracle[1], strict=True):
        if not math.isclose(a, b, rel_tol=1e-6 if exact else 1e-2):
            wrong.append(f"norm {a} {b}")
    for key, value in oracle[2].items():
        if exact and not torch.equal(mine[2][key], value):
            wrong.append(key)
        elif (mine[2][key].float() - value.float()).abs().max() > 100 * tolerance:
            wrong.append(f"{key} by {(mine[2][key].float() - value.float()).abs().max()}")
    return wrong


FP32_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((strategy, {"mode": mode}) for strategy in ZERO for mode in ("paper", "vendor")),
    ("zero3", {"persistence_numel": 60}),
    ("zero3", {"persistence_numel": 10**6}),
    ("zero3", {"reshard_after_forward": False}),
    ("zero1", {"overlap_gather": True}),
    ("zero2", {"overlap_gather": True}),
    ("zero2", {"tile_bytes": None}),
]
SHOWN = [FP32_OPTIONS[number] for number in (0, 3, 4, 6, 8, 10)]
"""Of every run: each option under one stage."""


def fp32(rank: int, n: int, thorough: bool) -> dict[str, list[str]]:
    oracle = ddp(rank, n, torch.float32)
    options = FP32_OPTIONS if thorough else SHOWN
    found = {str(one): same(ours(rank, n, one[0], torch.float32, **one[1]), oracle, n <= 2) for one in options}
    for norm_type in (2.0, math.inf, 1.0) if thorough else (1.0,):
        clipped = ddp(rank, n, torch.float32, 0.5, norm_type)
        for strategy in STAGES:
            mine = ours(rank, n, strategy, torch.float32, 0.5, norm_type)
            found[f"{strategy} clipped by {norm_type}"] = same(mine, clipped, False)
            if not all(math.isclose(a, b, rel_tol=2e-6) for a, b in zip(mine[1], clipped[1], strict=True)):
                found[f"{strategy} norms {norm_type}"] = [str((mine[1], clipped[1]))]
    return found


def half(rank: int, n: int, thorough: bool) -> dict[str, list[str]]:
    """Both ways of an option under every stage by turns, unless all are asked for; losses are scaled in every run."""
    found, every = {}, 1 if thorough else 2
    for dtype in (torch.bfloat16, torch.float16) if thorough else (torch.bfloat16,):
        oracle = ddp(rank, n, dtype)
        for number, strategy in enumerate(("ddp", *ZERO)):  # Megatron accumulates in fp32: below
            for options in ({}, {"tile_bytes": 1024})[number % every :: every]:
                mine = ours(rank, n, strategy, dtype, **options)
                found[f"{strategy} {dtype} {options}"] = same(mine, oracle, n <= 2, 0.02)
        beside = ours(rank, n, "zero3", dtype, shards="parameters")
        found[f"zero3 {dtype}, parameters beside the masters"] = same(ours(rank, n, "zero3", dtype), beside, True)
        clipped = ddp(rank, n, dtype, 0.5)
        wide = {"gradient_dtype": torch.float32}
        for number, strategy in enumerate(STAGES):
            for options in (wide, {**wide, "wire_dtype": dtype})[number % every :: every]:
                mine = ours(rank, n, strategy, dtype, 0.5, **options)
                found[f"{strategy} {dtype} {options}"] = same(mine, clipped, False, 0.02)
    found["wire"] = same(
        ours(rank, n, "zero2", torch.float32, wire_dtype=torch.bfloat16), ddp(rank, n, torch.float32), False, 0.02
    )
    scaling, scaled = LossScaling(initial=1024.0), ddp(rank, n, torch.float16, 0.5, scale=1024)
    for strategy in ["ddp", *STAGES][::every]:
        mine = ours(rank, n, strategy, torch.float16, 0.5, loss_scaling=scaling)
        found[f"{strategy} scaled"] = same(mine, scaled, False, 0.02)
    return found


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 4))])
def test_options_train_as_ddp_does(n: int, thorough: bool) -> None:
    """In every run clipped by the norm that no other test clips by."""
    for mine in run_ranks(n, fp32, thorough):
        assert {k: v for k, v in mine.items() if v} == {}


@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 3, 4))])
def test_half_precision_trains_as_ddp_with_masters_does(n: int, thorough: bool) -> None:
    for mine in run_ranks(n, half, thorough):
        assert {k: v for k, v in mine.items() if v} == {}


def shard_bytes(rank: int, n: int, strategy: str) -> list[int]:
    """Bytes of memory that the gradient shards have: at the start, after two micro-batches each, a step, zero_grad."""
    model = model_of()
    engine = initialize(model, adamw(model.parameters()), strategy, bucket_bytes=4096)
    seen = []

    def look() -> None:
        seen.append(sum(unit.gradients.shard.untyped_storage().nbytes() for unit in engine.units))

    look()
    for consume in (engine.step, engine.zero_grad):
        for micro in range(2):
            engine.backward(engine(*zoo.tokens(rank, n, micro)))
            look()
        consume()
        look()
    whole = sum(4 * unit.layout.shard_numel for unit in engine.units)
    return [size // whole if size % whole == 0 else size for size in seen]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_gradient_shards_have_memory_from_reduction_to_update(strategy: str) -> None:
    assert run_ranks(2, shard_bytes, strategy) == [[0, 1, 1, 0, 1, 1, 0]] * 2
