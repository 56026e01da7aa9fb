"""The engine's streams on a GPU, without one: no race in a modelled GPU (streams.py), and planted races are seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import zoo
from tests.distributed.streams import ModelledCuda, RaceDetector
from tests.distributed.test_races import RUNS
from zerobench.zero import Zeropp, backends, initialize, lanes, simulated
from zerobench.zero.backends import FAKE

STEPS = 3

IN_GROUPS: list[tuple[str, dict[str, Any]]] = [
    ("zero1", {"node_size": 2, "overlap_gather": True}),
    ("zero2", {"shard_group": 2}),
    ("zero3", {"shard_group": 2, "prefetch": 2}),
    ("zero3", {"node_size": 2}),
    ("zero3", {"node_size": 2, "zeropp": Zeropp(True, True, True), "prefetch": 2}),
]


@pytest.fixture(params=[2, 4])
def cuda(request: pytest.FixtureRequest) -> Iterator[ModelledCuda]:
    """A simulated world on a modelled GPU."""
    dist.init_process_group(FAKE, rank=1, world_size=request.param)
    modelled = ModelledCuda()
    on_gpu = {"cpu": partial(simulated.SimulatedNccl, cuda=modelled)}
    with mock.patch.object(simulated, "KINDS", on_gpu):
        yield modelled
    dist.destroy_process_group()


def races_of(cuda: ModelledCuda, strategy: str, options: dict[str, Any], model: str = "tied", mistake: Any = None):
    module = zoo.build(model)
    optimizer = zoo.OPTIMIZERS["adamw"](module.parameters())
    with RaceDetector(cuda) as detector:
        engine = initialize(module, optimizer, strategy, bucket_bytes=4096, **options)
        assert engine.comm.in_lanes
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


@pytest.mark.parametrize(("strategy", "options"), RUNS)
def test_no_race(cuda: ModelledCuda, strategy: str, options: dict[str, Any]) -> None:
    assert races_of(cuda, strategy, options) == []


@pytest.mark.parametrize(("strategy", "options"), IN_GROUPS)
def test_no_race_in_groups(cuda: ModelledCuda, strategy: str, options: dict[str, Any]) -> None:
    assert races_of(cuda, strategy, options) == []


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_no_race_with_unused_parameters(cuda: ModelledCuda, strategy: str) -> None:
    assert races_of(cuda, strategy, {}, "unused") == []


@contextmanager
def unawaited() -> Iterator[None]:
    """The current stream goes on before the collective has ended."""
    with mock.patch.object(lanes.InLane, "wait", return_value=None):
        yield


@contextmanager
def launched_too_early() -> Iterator[None]:
    """The lane does not wait for what is to be sent."""

    def launch(lane: lanes.Lane, collective: Callable[..., Any]) -> lanes.InLane:
        with lane._cuda.stream(lane._stream):
            collective(async_op=False)
        return lanes.InLane(lane._cuda, lane._stream.record_event())

    with mock.patch.object(lanes.Lane, "launch", launch):
        yield


@contextmanager
def ended_too_early() -> Iterator[None]:
    """The event that is waited for was recorded before the collective."""

    def launch(lane: lanes.Lane, collective: Callable[..., Any]) -> lanes.InLane:
        lane._stream.wait_stream(lane._cuda.current_stream())
        end = lane._stream.record_event()
        with lane._cuda.stream(lane._stream):
            collective(async_op=False)
        return lanes.InLane(lane._cuda, end)

    with mock.patch.object(lanes.Lane, "launch", launch):
        yield


@pytest.mark.parametrize("mistake", [unawaited, launched_too_early, ended_too_early])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_planted_races_are_seen(cuda: ModelledCuda, strategy: str, mistake: Any) -> None:
    assert races_of(cuda, strategy, {}, mistake=mistake)


def test_a_collective_that_is_dropped_is_waited_for() -> None:
    cuda = ModelledCuda()
    lane = lanes.Lane(cuda)
    ticket = lane.launch(lambda async_op: cuda.current_stream().tick())
    assert cuda.current_stream().clock == {}
    del ticket
    assert cuda.current_stream().clock == {1: 1}


def test_seams_by_backend_and_device() -> None:
    assert backends._kinds()["nccl", "cuda"] is backends.NcclComm
    assert backends._kinds()["gloo", "cuda"] is backends.StagedComm
    assert backends._kinds()[FAKE, "cuda"] is simulated.SimulatedNccl
