"""Options of a caller, against torch DDP: modes, kept units, gathers that overlap, clipping, dtypes."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests import zoo
from tests.distributed import training
from tests.ranks import on_ranks
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


def check(found: Any, oracle: Any, exact: bool, *about: Any, tolerance: float = 2e-4) -> None:
    """Losses, norms and weights, to the bit if `exact`."""
    if exact:
        training.assert_same(found[::2], oracle[::2], *about)
    assert found[0] == pytest.approx(oracle[0], rel=tolerance), about
    assert found[1] == pytest.approx(oracle[1], rel=1e-6 if exact else 1e-2), about
    training.assert_close(found[::2], oracle[::2], 1, 100 * tolerance, *about)


FP32_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((strategy, {"mode": mode}) for strategy in ZERO for mode in ("paper", "vendor")),
    ("zero3", {"prefetch": 0}),
    ("zero3", {"prefetch": 3}),
    ("zero3", {"persistence_numel": 60}),
    ("zero3", {"persistence_numel": 10**6}),
    ("zero3", {"reshard_after_forward": False}),
    ("zero1", {"overlap_gather": True}),
    ("zero2", {"overlap_gather": True}),
    ("zero2", {"tile_bytes": None}),
]
SHOWN = [FP32_OPTIONS[number] for number in (0, 3, 4, 7, 8, 10, 13)]
"""Of every run: each option under one stage."""


@on_ranks(3, 1, 4)
def test_options_train_as_ddp_does(rank: int, n: int, thorough: bool) -> None:
    """In every run clipped by the norm that no other test clips by."""
    oracle = ddp(rank, n, torch.float32)
    for strategy, options in FP32_OPTIONS if thorough else SHOWN:
        check(ours(rank, n, strategy, torch.float32, **options), oracle, n <= 2, strategy, options)
    for norm_type in (2.0, math.inf, 1.0) if thorough else (1.0,):
        clipped = ddp(rank, n, torch.float32, 0.5, norm_type)
        for strategy in STAGES:
            found = ours(rank, n, strategy, torch.float32, 0.5, norm_type)
            check(found, clipped, False, strategy, norm_type)
            assert found[1] == pytest.approx(clipped[1], rel=2e-6), (strategy, norm_type)


@on_ranks(2, 1, 3, 4)
def test_half_precision_trains_as_ddp_with_masters_does(rank: int, n: int, thorough: bool) -> None:
    """Both ways of an option under every stage by turns, unless all are asked for; losses are scaled in every run."""
    every, near = 1 if thorough else 2, partial(check, tolerance=0.02)
    for dtype in (torch.bfloat16, torch.float16) if thorough else (torch.bfloat16,):
        oracle = ddp(rank, n, dtype)
        for number, strategy in enumerate(("ddp", *ZERO)):  # Megatron accumulates in fp32: below
            for options in ({}, {"tile_bytes": 1024})[number % every :: every]:
                near(ours(rank, n, strategy, dtype, **options), oracle, n <= 2, strategy, dtype, options)
        beside = ours(rank, n, "zero3", dtype, shards="parameters")
        check(ours(rank, n, "zero3", dtype), beside, True, dtype, "parameters beside the masters")
        clipped = ddp(rank, n, dtype, 0.5)
        wide = {"gradient_dtype": torch.float32}
        for number, strategy in enumerate(STAGES):
            for options in (wide, {**wide, "wire_dtype": dtype})[number % every :: every]:
                near(ours(rank, n, strategy, dtype, 0.5, **options), clipped, False, strategy, dtype, options)
    wire = ours(rank, n, "zero2", torch.float32, wire_dtype=torch.bfloat16)
    near(wire, ddp(rank, n, torch.float32), False, "wire")
    scaling, scaled = LossScaling(initial=1024.0), ddp(rank, n, torch.float16, 0.5, scale=1024)
    for strategy in ["ddp", *STAGES][::every]:
        near(ours(rank, n, strategy, torch.float16, 0.5, loss_scaling=scaling), scaled, False, strategy, "scaled")


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@on_ranks(2)
def test_gradient_shards_have_memory_from_reduction_to_update(rank: int, n: int, strategy: str) -> None:
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
    assert seen == [0, whole, whole, 0, whole, whole, 0], "after two micro-batches, a step, two, and zero_grad"
