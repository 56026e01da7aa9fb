"""Residual policies: nothing but bytes changes, under any strategy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests import zoo
from tests.distributed.training import assert_same, engine_of, loss_of
from tests.ranks import on_ranks
from zerobench.zero.activations.policies import POLICIES, ActivationPolicy, apply


class Attending(nn.Module):
    """A block that saves views of one memory, odd strides, a mask and what is written to before it is saved."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.three = nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.three(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        h = self.out(self.drop(mixed.transpose(1, 2).flatten(2)))
        return x + torch.relu_(h.mul_(2.0))[..., ::2].repeat(1, 1, 2) * h[..., 1::2].repeat(1, 1, 2).cos()


zoo.MODELS["dropping"] = lambda: zoo.Chain(*(Attending() for _ in range(4)), width=24)

SLABS = ActivationPolicy(recompute=True, keep="slab")
WAYS = {**POLICIES, "checkpoint in slabs": SLABS}
del WAYS["none"]
STEPS = 2


def train(rank: int, n: int, model_name: str, strategy: str, policy: ActivationPolicy, **options: Any) -> Any:
    """(losses, the full state at the end), with two micro-batches a step, in dropout's own random numbers."""
    model = zoo.build(model_name)
    apply(model, replace(policy, least_bytes=256))
    engine = engine_of(strategy, model, zoo.OPTIMIZERS["adamw"](model.parameters()), **options)
    torch.manual_seed(rank)
    losses = []
    for step in range(STEPS):
        for micro in range(2):
            loss = loss_of(engine(*zoo.tokens(rank, n, 2 * step + micro)))
            engine.backward(loss / 2)
            losses.append(loss.item())
        engine.step()
    return losses, engine.full_state_dict()


@on_ranks(2, 1)
def test_every_policy_trains_the_same_to_the_bit(rank: int, n: int, thorough: bool) -> None:
    """Dropout, views that share memory, blocks run twice, outputs in dataclasses; an arena, too."""
    for model in ["dropping", "tied", "rich"] if n == 1 else ["dropping"]:
        for strategy in ["ddp", "zero2", "zero3"] if thorough else ["zero3"]:
            plain = train(rank, n, model, strategy, POLICIES["none"])
            for name, policy in WAYS.items():
                assert_same(train(rank, n, model, strategy, policy), plain, model, strategy, name)
            if strategy != "ddp":
                assert_same(train(rank, n, model, strategy, SLABS, arena=True), plain, model, strategy, "arena")


class Births(TorchDispatchMode):
    """Counts what memory is asked for inside, by its size in bytes: storages `made`, and old ones that have `grown`."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[int] = Counter()
        self.grown: Counter[int] = Counter()
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Births:
        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", lambda one, size: self._grow(one, size))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def _grow(self, storage: torch.UntypedStorage, size: int) -> Any:
        self.grown[size] += size > storage.nbytes()
        return self._resize(storage, size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.made[out.untyped_storage().nbytes()] += 1
        return out


def made_anew(rank: int, n: int, strategy: str, arena: bool) -> list[int]:
    """Counts, per step, the allocations of the size of full gradients, of their shards, or of kept inputs."""
    model = zoo.build("dropping")
    apply(model, replace(SLABS, least_bytes=256) if arena else POLICIES["checkpoint"])
    engine = engine_of(strategy, model, zoo.OPTIMIZERS["adamw"](model.parameters()), arena=arena)
    layouts = [unit.layout for unit in engine.units]
    shards, full = {4 * one.shard_numel for one in layouts}, {4 * one.padded_numel for one in layouts}
    kept = 4 * zoo.tokens(rank, n, 0)[0].numel() * 24
    found = []
    for step in range(4):
        with Births() as births:
            engine.backward(engine(*zoo.tokens(rank, n, step)))
            engine.step()
        found.append(sum(births.made[size] for size in {*full, kept}) + sum(births.grown[size] for size in shards))
    return found


@pytest.mark.parametrize("strategy", [pytest.param("zero2", marks=pytest.mark.thorough), "zero3"])
@on_ranks(2)
def test_in_an_arena_nothing_is_allocated_from_the_second_step_on(rank: int, n: int, strategy: str) -> None:
    """Neither full gradients nor their shards nor the inputs that blocks keep."""
    assert all(count >= 4 for count in made_anew(rank, n, strategy, arena=False))
    first, *later = made_anew(rank, n, strategy, arena=True)
    assert first >= 4
    assert later == [0, 0, 0]
