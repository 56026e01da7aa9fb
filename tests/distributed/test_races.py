"""Overlapped and serialized runs agree bit for bit, freed buffers poisoned (races.py); and planted races are seen."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests import zoo
from tests.distributed import races
from tests.ranks import run_ranks
from zerobench.zero import initialize

STEPS = 3

RUNS: list[tuple[str, dict[str, Any]]] = [
    ("zero1", {}),
    ("zero1", {"overlap_gather": True}),
    ("zero1", {"wire_dtype": torch.bfloat16}),
    ("zero2", {}),
    ("zero2", {"overlap_gather": True}),
    ("zero2", {"wire_dtype": torch.bfloat16}),
    ("megatron", {}),
    *(("zero3", {"prefetch": depth}) for depth in range(4)),
    ("zero3", {"prefetch": 2, "keep_root": False}),
    ("zero3", {"prefetch": 2, "reshard_after_forward": False}),
    ("zero3", {"persistence_numel": 60}),
]


def engine_for(strategy: str, options: dict[str, Any], model: str = "tied") -> Any:
    module = zoo.build(model)
    return initialize(module, zoo.OPTIMIZERS["adamw"](module.parameters()), strategy, bucket_bytes=4096, **options)


def train(engine: Any, rank: int, n: int) -> list[torch.Tensor]:
    """Losses and weights, as a list of tensors. Two micro-batches a step, an evaluation after each step."""
    losses = []
    for step in range(STEPS):
        for micro in range(2):
            loss = engine(*zoo.tokens(rank, n, 2 * step + micro))
            engine.backward(loss)
            losses.append(loss.detach())
        engine.step()
        with torch.no_grad():
            losses.append(engine(*zoo.tokens(rank, n, 50)))
    return [torch.stack(losses), *engine.full_state_dict().values()]


def in_series(rank: int, n: int, strategy: str, options: dict[str, Any], model: str = "tied") -> list[torch.Tensor]:
    engine = engine_for(strategy, options, model)
    with races.serialized(engine):
        return train(engine, rank, n)


def overlapped(rank: int, n: int, strategy: str, options: dict[str, Any], model: str = "tied", mistake: Any = None):
    """Late and poisoned. `mistake`: transfers that are not waited for, or a context that makes one."""
    engine = engine_for(strategy, options, model)
    with ExitStack() as stack:
        stack.enter_context(races.late(rank, mistake if isinstance(mistake, tuple) else None))
        done = stack.enter_context(races.poisoned(engine))
        if callable(mistake):
            stack.enter_context(mistake(engine))
        results = train(engine, rank, n)
    assert "gradients" in done
    assert strategy in ("zero1", "megatron") or "storage" in done
    return results


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def compare(rank: int, n: int) -> list[str]:
    wrong = []
    for strategy, options in RUNS:
        for model in ("tied", "recomputed") if strategy == "zero3" and n == 2 else ("tied",):
            expected = in_series(rank, n, strategy, options, model)
            assert all(values.isfinite().all() for values in expected)
            if not equal(overlapped(rank, n, strategy, options, model), expected):
                wrong.append(f"{strategy} {options} {model}")
    return wrong


@pytest.mark.thorough
@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_overlapped_runs_equal_serialized_ones(n: int) -> None:
    assert run_ranks(n, compare) == [[]] * n


PLANTED: dict[str, tuple[str, dict[str, Any], Any]] = {
    "gradients given back before they are sent": ("zero2", {}, races.UNSENT),
    "gradients overwritten before they are sent": ("zero1", {}, races.UNSENT),
    "gradients summed before they have come": ("zero2", {}, races.UNRECEIVED),
    "parameters read before they have come": ("zero3", {"prefetch": 1}, races.unawaited_gathers),
    "updated parameters read before they have come": ("zero1", {"overlap_gather": True}, races.unawaited_gathers),
}


def plant(rank: int, n: int) -> list[str]:
    """The mistakes that no rank has noticed go unseen: those that this one has not."""
    return [
        name
        for name, (strategy, options, mistake) in PLANTED.items()
        if equal(overlapped(rank, n, strategy, options, mistake=mistake), in_series(rank, n, strategy, options))
    ]


def test_planted_races_are_seen() -> None:
    assert run_ranks(2, plant) == [[], []]
