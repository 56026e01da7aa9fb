"""The engine's streams on a GPU, without one: no race in a modeled GPU (host/pipes.py), and planted races are seen."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import zoo
from tests.distributed.streams import ModeledCuda, RaceDetector
from tests.distributed.test_races import RUNS
from zerobench.zero import Zeropp, initialize
from zerobench.zero.comm import backends, hierarchical, simulated, streams
from zerobench.zero.comm.backends import FAKE

STEPS = 2

IN_GROUPS: list[tuple[str, dict[str, Any]]] = [
    ("zero1", {"node_size": 2, "overlap_gather": True}),
    ("zero2", {"shard_group": 2}),
    ("zero3", {"shard_group": 2, "prefetch": 2}),
    ("zero3", {"node_size": 2}),
    ("zero3", {"node_size": 2, "zeropp": Zeropp(True, True, True), "prefetch": 2}),
]


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.thorough)])
def cuda(request: pytest.FixtureRequest) -> Iterator[ModeledCuda]:
    with world(request.param, 1) as modeled:
        yield modeled


@contextmanager
def world(size: int, rank: int) -> Iterator[ModeledCuda]:
    """A simulated world on a modeled GPU."""
    dist.init_process_group(FAKE, rank=rank, world_size=size)
    modeled = ModeledCuda()
    on_gpu = {"cpu": partial(simulated.SimulatedNccl, cuda=modeled)}
    try:
        with mock.patch.object(simulated, "KINDS", on_gpu):
            yield modeled
    finally:
        dist.destroy_process_group()


def races_of(cuda: ModeledCuda, strategy: str, options: dict[str, Any], model: str = "tied", mistake: Any = None):
    module = zoo.build(model)
    optimizer = zoo.OPTIMIZERS["adamw"](module.parameters())
    with RaceDetector(cuda) as detector:
        engine = initialize(module, optimizer, strategy, bucket_bytes=4096, **options)
        assert engine.comm.on_streams
        with (mistake or nullcontext)():
            for step in range(STEPS):
                for micro in range(2):
                    engine.backward(engine(*zoo.tokens(1, 2, 2 * step + micro)))
                engine.clip_grad_norm_(1.0)
                engine.step()
                with torch.no_grad():
                    engine(*zoo.tokens(1, 2, 50))
            engine.settle()
        lanes_used = [stream for stream in cuda.streams[1:] if stream.clock.get(stream.number)]
        assert len(lanes_used) >= 2
        if not options.keys() & {"node_size", "shard_group", "zeropp"}:
            assert len(lanes_used) == 2
    return detector.races


@pytest.mark.shown(8)
@pytest.mark.parametrize(("strategy", "options"), RUNS)
def test_no_race(cuda: ModeledCuda, strategy: str, options: dict[str, Any]) -> None:
    assert races_of(cuda, strategy, options) == []


@pytest.mark.parametrize(("strategy", "options"), IN_GROUPS)
def test_no_race_in_groups(cuda: ModeledCuda, strategy: str, options: dict[str, Any]) -> None:
    assert races_of(cuda, strategy, options) == []


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_no_race_with_unused_parameters(cuda: ModeledCuda, strategy: str) -> None:
    assert races_of(cuda, strategy, {}, "unused") == []


@contextmanager
def unawaited() -> Iterator[None]:
    """The current stream goes on before the collective has ended."""
    with mock.patch.object(streams.StreamWork, "wait", return_value=None):
        yield


@contextmanager
def launched_too_early() -> Iterator[None]:
    """The stream does not wait for what is to be sent."""

    def launch(stream: streams.CommStream, collective: Callable[..., Any]) -> streams.StreamWork:
        with stream._cuda.stream(stream._stream):
            collective(async_op=False)
        return streams.StreamWork(stream._cuda, stream._stream.record_event())

    with mock.patch.object(streams.CommStream, "launch", launch):
        yield


@contextmanager
def ended_too_early() -> Iterator[None]:
    """The event that is waited for was recorded before the collective."""

    def launch(stream: streams.CommStream, collective: Callable[..., Any]) -> streams.StreamWork:
        stream._stream.wait_stream(stream._cuda.current_stream())
        end = stream._stream.record_event()
        with stream._cuda.stream(stream._stream):
            collective(async_op=False)
        return streams.StreamWork(stream._cuda, end)

    with mock.patch.object(streams.CommStream, "launch", launch):
        yield


@pytest.mark.shown(5)
@pytest.mark.parametrize("mistake", [unawaited, launched_too_early, ended_too_early])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_planted_races_are_seen(cuda: ModeledCuda, strategy: str, mistake: Any) -> None:
    assert races_of(cuda, strategy, {}, mistake=mistake)


def test_a_collective_that_is_dropped_is_waited_for() -> None:
    cuda = ModeledCuda()
    stream = streams.CommStream(cuda)
    ticket = stream.launch(lambda async_op: cuda.current_stream().tick())
    assert cuda.current_stream().clock == {}
    del ticket
    assert cuda.current_stream().clock == {1: 1}


def test_seams_by_backend_and_device() -> None:
    assert hierarchical.kinds()["nccl", "cuda"] is backends.NcclComm
    assert hierarchical.kinds()["gloo", "cuda"] is backends.StagedComm
    assert hierarchical.kinds()[FAKE, "cuda"] is simulated.SimulatedNccl
