"""The engine on a GPU: no step waits for it, memory does not grow, and late streams change nothing.

One process is rank 1 of a simulated world (real streams and tensors), so that one GPU is enough.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import zoo
from tests.distributed.test_no_waiting import VARIANTS
from tests.distributed.test_races import RUNS
from zerobench.zero import initialize, lanes
from zerobench.zero.comm import FAKE
from zerobench.zero.simulated import SimulatedNccl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LATE_CYCLES = 2_000_000
"""About a millisecond: longer than what computes beside it in these models."""


@pytest.fixture(params=[2, 4], autouse=True)
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    dist.init_process_group(FAKE, rank=1, world_size=request.param)
    yield
    dist.destroy_process_group()


def engine_for(strategy: str, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    module = zoo.build("tied").to("cuda", dtype)
    engine = initialize(module, zoo.OPTIMIZERS["adamw"](module.parameters()), strategy, bucket_bytes=4096, **options)
    assert isinstance(engine.comm, SimulatedNccl)
    return engine


def batch(number: int) -> list[torch.Tensor]:
    return [tensor.pin_memory().to("cuda", non_blocking=True) for tensor in zoo.tokens(1, 2, number)]


def step(engine: Any, number: int) -> torch.Tensor:
    loss: torch.Tensor = engine(*batch(number))
    engine.backward(loss)
    engine.clip_grad_norm_(1.0)
    engine.step()
    return loss.detach()


@pytest.mark.parametrize(("strategy", "options", "dtype"), VARIANTS)
def test_no_step_waits_for_the_gpu(strategy: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    engine = engine_for(strategy, options, dtype)
    for number in range(3):
        step(engine, number)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3, 6):
            step(engine, number)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_memory_does_not_grow_when_the_host_runs_ahead(strategy: str) -> None:
    engine = engine_for(strategy, {})
    with late():
        for number in range(5):
            step(engine, number)
        held = torch.cuda.memory_reserved()
        for number in range(5, 40):
            step(engine, number)
        assert torch.cuda.memory_reserved() == held


@contextmanager
def late() -> Iterator[None]:
    """Every collective takes its time to start."""
    launch = lanes.Lane.launch

    def launch_late(lane: lanes.Lane, collective: Any) -> Any:
        def collective_late(async_op: bool) -> Any:
            torch.cuda._sleep(LATE_CYCLES)
            return collective(async_op=async_op)

        return launch(lane, collective_late)

    with mock.patch.object(lanes.Lane, "launch", launch_late):
        yield


@contextmanager
def in_series() -> Iterator[None]:
    """The device is idle whenever a collective is launched or waited for."""
    launch, wait = lanes.Lane.launch, lanes.InLane.wait

    def launch_alone(lane: lanes.Lane, collective: Any) -> Any:
        torch.cuda.synchronize()
        ticket = launch(lane, collective)
        torch.cuda.synchronize()
        return ticket

    with mock.patch.object(lanes.Lane, "launch", launch_alone), mock.patch.object(lanes.InLane, "wait", wait):
        yield


def trained(strategy: str, options: dict[str, Any]) -> list[torch.Tensor]:
    engine = engine_for(strategy, options)
    losses = [step(engine, number) for number in range(4)]
    state = copy.copy(engine.state_dict()["tensors"])
    return [torch.stack(losses).cpu(), *(tensor.cpu() for tensor in state.values())]


@pytest.mark.parametrize(("strategy", "options"), RUNS)
def test_late_collectives_change_nothing(strategy: str, options: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with in_series():
            expected = trained(strategy, options)
        with late():
            got = trained(strategy, options)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@contextmanager
def unawaited() -> Iterator[None]:
    with mock.patch.object(lanes.InLane, "wait", return_value=None):
        yield


def test_a_planted_race_is_seen() -> None:
    with in_series():
        expected = trained("zero3", {"prefetch": 2})
    with late(), unawaited():
        got = trained("zero3", {"prefetch": 2})
    torch.cuda.synchronize()
    assert any(not torch.equal(one, other) for one, other in zip(got, expected, strict=True))
