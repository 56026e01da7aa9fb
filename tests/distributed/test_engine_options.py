"""Options of a caller, against torch DDP: modes, kept units, gathers that overlap, clipping, dtypes, one kernel."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests import zoo
from tests.distributed import training
from tests.plain_kernels import acts_as_gpu
from tests.ranks import on_ranks
from zerobench.strategies import wrap
from zerobench.strategies.ddp import MasterDdpEngine
from zerobench.zero import STAGES, LossScaling, initialize
from zerobench.zero.optim.step_by_tiles import ONE_PASS

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


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@on_ranks(2)
def test_gradients_have_the_same_memory_from_reduction_to_update(rank: int, n: int, strategy: str) -> None:
    model = model_of()
    engine = initialize(model, adamw(model.parameters()), strategy, bucket_bytes=4096)
    seen = []

    def look() -> None:
        storages = (unit.gradients.shard.untyped_storage() for unit in engine.units)
        seen.append([(storage.nbytes(), storage.data_ptr()) for storage in storages if storage.nbytes()])

    look()
    for consume in (engine.step, engine.zero_grad):
        for micro in range(2):
            engine.backward(engine(*zoo.tokens(rank, n, micro)))
            look()
        consume()
        look()
    first, second = seen[1], seen[4]
    assert seen == [[], first, first, [], second, second, []], "after two micro-batches, a step, two, and zero_grad"
    sizes = [4 * (u.layout.padded_numel if strategy == "zero1" else u.layout.shard_numel) for u in engine.units]
    assert [size for size, _ in first] == [size for size, _ in second] == sizes


# -- updates as on a GPU, by one kernel ---------------------------------------------------------------------------

UPDATED: dict[str, dict[str, Any]] = {
    "zero1": {}, "zero2": {"gradient_dtype": torch.float32}, "zero3": {}, "megatron": {},
}  # fmt: skip


def updating_engine(strategy: str, tile_bytes: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Several buckets or units; two parameter groups."""
    model = zoo.build("tied").to(dtype)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups: Any = [
        {"params": matrices},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    options: dict[str, Any] = {"tile_bytes": tile_bytes}
    if dtype == torch.float16:
        options["loss_scaling"] = LossScaling(initial=2.0**22, interval=2)  # the first steps overflow
    if strategy == "ddp":
        section = {"name": "ddp", "bucket_bytes": 4096, "broadcast_buffers": True}
        return wrap(section, model, optimizer, **options)
    options |= UPDATED[strategy] if strategy == "zero3" else UPDATED[strategy] | {"bucket_bytes": 4096}
    return initialize(model, optimizer, strategy, **options)


def train_clipped(engine: Any, rank: int, n: int, steps: int = 4) -> list[float]:
    return training.train_on(engine, (zoo.tokens(rank, n, step) for step in range(steps)), clip=0.5)


@on_ranks(2, 1)
def test_losses_are_those_of_tiles(rank: int, n: int, thorough: bool) -> None:
    cases = [("ddp", torch.float16), *((one, torch.bfloat16) for one in ("ddp", *UPDATED)), ("zero2", torch.float16)]
    for strategy, dtype in cases if thorough else cases[1::2]:
        with acts_as_gpu():
            one_pass, tiles = (
                train_clipped(updating_engine(strategy, tile, dtype), rank, n) for tile in (ONE_PASS, 1024)
            )
        assert one_pass == tiles, (strategy, dtype)
        assert len(set(one_pass)) > 2


@on_ranks(2)
def test_all_ranks_learn_of_a_lost_write(rank: int, n: int, tmp_path: Path) -> None:
    """That one rank's update has replaced: at a step, at a save and after both."""
    with acts_as_gpu():
        engine = updating_engine("zero2", ONE_PASS)
        train_clipped(engine, rank, n, 1)
        for call in (
            lambda: train_clipped(engine, rank, n, 1),
            lambda: engine.save(tmp_path / "saved"),
            engine.full_state_dict,
        ):
            engine.module.embedding.weight.data[0, 0] += 1  # in the shard of one rank
            train_clipped(engine, rank, n, 1)
            with pytest.raises(RuntimeError, match=r"embedding\.weight: it was written to between steps"):
                call()
            engine.zero_grad()
            assert train_clipped(engine, rank, n, 2)[-1] > 0
