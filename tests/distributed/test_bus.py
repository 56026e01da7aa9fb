"""Copies between a GPU and host memory in streams of their own: no race in a modelled GPU (streams.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import zoo
from tests.distributed.streams import ModelledCuda, RaceDetector
from zerobench.zero import Offload, host, initialize, simulated, unit
from zerobench.zero.backends import FAKE

PARTS = {
    "all": Offload(),
    "optimizer": Offload(gradients=False),
    "gradients": Offload(optimizer=False),
    "half": Offload(fraction=0.5),
    "parameters": Offload(parameters=True),
}


@pytest.fixture
def cuda() -> Iterator[ModelledCuda]:
    """A simulated world on a modelled GPU, with a bus."""
    dist.init_process_group(FAKE, rank=1, world_size=2)
    modelled = ModelledCuda()
    on_gpu = {"cpu": partial(simulated.SimulatedNccl, cuda=modelled)}
    with mock.patch.object(simulated, "KINDS", on_gpu), mock.patch.object(host, "STREAMS", {"cpu": modelled}):
        yield modelled
    dist.destroy_process_group()


def races_of(
    cuda: ModelledCuda, strategy: str, offload: Offload, mistake: Any = nullcontext, dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    module = zoo.build("tied").to(dtype)
    optimizer = zoo.OPTIMIZERS["adamw"](module.parameters())
    with RaceDetector(cuda) as detector, mistake():
        engine = initialize(module, optimizer, strategy, bucket_bytes=4096, tile_bytes=4096, offload=offload)
        for step in range(3):
            for micro in range(2):
                engine.backward(engine(*zoo.tokens(1, 2, 2 * step + micro)))
            engine.clip_grad_norm_(1.0)
            engine.step()
        engine.settle()
    assert len(cuda.streams) == 5
    return detector.races


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("strategy", "parts"),
    [(s, p) for s in ("zero1", "zero2", "zero3") for p in PARTS if s == "zero3" or p != "parameters"],
)
def test_no_race(cuda: ModelledCuda, strategy: str, parts: str, dtype: torch.dtype) -> None:
    assert races_of(cuda, strategy, PARTS[parts], dtype=dtype) == []


@contextmanager
def let_go_at_once() -> Iterator[None]:
    """What gradients leave from is given back while it is copied."""

    def let_go(departing: unit.Departing) -> None:
        if departing.wire is not None:
            departing.heap.give_back(departing.wire)

    with mock.patch.object(unit.Departing, "let_go", let_go):
        yield


@contextmanager
def nobody_waits() -> Iterator[None]:
    """The host reads gradients that are still on their way."""
    with mock.patch.object(host, "_wait", return_value=None):
        yield


@contextmanager
def gathered_too_early() -> Iterator[None]:
    """Updated parameters are sent on before they are up."""
    with mock.patch.object(host.Bus, "join", return_value=None):
        yield


@pytest.mark.parametrize("mistake", [let_go_at_once, nobody_waits, gathered_too_early])
def test_planted_races_are_seen(cuda: ModelledCuda, mistake: Any) -> None:
    assert races_of(cuda, "zero2", Offload(), mistake)
