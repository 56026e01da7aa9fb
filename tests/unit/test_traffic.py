"""The traffic meter on each collective, in a world of two: bytes of the logical tensor, never of its storage."""

import threading
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.ranks import run_ranks
from zerobench.probes.traffic import TrafficMeter
from zerobench.zero import labels


def issue_everything(rank: int, n: int) -> dict[str, tuple]:
    warnings.simplefilter("ignore")
    meter = TrafficMeter()
    meter.phase = "backward"
    big = torch.ones(1024)
    view = big[:16]
    half = torch.ones(8)
    calls = {
        "all_reduce": lambda: dist.all_reduce(view),
        "broadcast": lambda: dist.broadcast(view, 0),
        "all_gather_into": lambda: dist.all_gather_into_tensor(view, half),
        "all_gather": lambda: dist.all_gather([torch.empty(8) for _ in range(n)], half),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(half, view),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(16), view),
        "exchange": lambda: exchange(rank),
        "scalar": lambda: dist.all_reduce(torch.ones(1)),
        "flags": lambda: dist.all_reduce(torch.ones(7, dtype=torch.int32)),
        "labeled": lambda: labeled(view),
        "barrier": dist.barrier,
        "functional_reduce": lambda: functional.all_reduce(view, "sum", dist.group.WORLD).add(0),
        "functional_gather": lambda: functional.all_gather_tensor(half, 0, dist.group.WORLD).add(0),
        "functional_scatter": lambda: functional.reduce_scatter_tensor(view, "sum", 0, dist.group.WORLD).add(0),
    }
    seen = {}
    with meter:
        for name, call in calls.items():
            call()
            seen[name] = [
                (o.operator, o.payload_bytes, o.wire_bytes, o.volume_elements, o.control) for o, _ in meter.operations
            ]
            meter.operations.clear()
    return seen


def exchange(rank: int) -> None:
    works = [dist.irecv(torch.empty(8), 1 - rank), dist.isend(torch.ones(8), 1 - rank)]
    for work in works:
        work.wait()


def labeled(view: torch.Tensor) -> None:
    with labels.collective("control"):
        dist.broadcast(view, 0)


@pytest.mark.slow
def test_every_collective_in_a_world_of_two() -> None:
    for seen in run_ranks(2, issue_everything):
        assert seen["all_reduce"] == [("allreduce_", 64, 64.0, 32, False)]
        assert seen["broadcast"] == [("broadcast_", 64, 32.0, 16, False)]
        assert seen["all_gather_into"] == [("_allgather_base_", 64, 32.0, 16, False)]
        assert seen["all_gather"] == [("allgather_", 64, 32.0, 16, False)]
        assert seen["reduce_scatter"] == [("_reduce_scatter_base_", 64, 32.0, 16, False)]
        assert seen["all_to_all"] == [("alltoall_base_", 64, 32.0, 16, False)]
        assert seen["exchange"] == [("send", 32, 32.0, 16.0, False)]
        assert seen["scalar"] == [("allreduce_", 4, 4.0, 0.0, True)]
        assert seen["flags"] == [("allreduce_", 28, 28.0, 0.0, True)]
        assert seen["labeled"] == [("broadcast_", 64, 32.0, 0.0, True)]
        assert seen["barrier"] == []
        assert seen["functional_reduce"] == [("all_reduce", 64, 64.0, 32, False)]
        assert seen["functional_gather"] == [("all_gather_into_tensor", 64, 32.0, 16, False)]
        assert seen["functional_scatter"] == [("reduce_scatter_tensor", 64, 32.0, 16, False)]


def test_what_a_thread_sends_is_not_the_engines() -> None:
    """Whatever collective the engine is in meanwhile."""
    meter = TrafficMeter()
    meter.phase = "backward"
    sent = ("allreduce_", ([torch.ones(16)],), 2)
    with labels.collective("reduce_scatter", "bucket 0"):
        meter.note_raw(*sent)
        thread = threading.Thread(target=meter.note_raw, args=sent, name="stray")
        thread.start()
        thread.join()
    named = [(one.collective, one.unit, one.volume_elements) for one, _ in meter.operations]
    assert named == [("reduce_scatter", "bucket 0", 32), ("", "thread stray", 32)]


def send_in_a_thread(rank: int, n: int) -> list[tuple]:
    meter = TrafficMeter()
    meter.phase = "backward"
    labels.listen(meter)
    try:
        for follows in (True, False):
            with meter, labels.collective("reduce_scatter", "bucket 0"):
                thread = labels.EngineThread(target=exchange_in_thread, args=(rank, follows))
                thread.start()
                thread.join()
    finally:
        labels.unlisten(meter)
    return [(one.operator, one.phase, one.collective, one.unit, one.volume_elements) for one, _ in meter.operations]


def exchange_in_thread(rank: int, follows: bool) -> None:
    with labels.followed() if follows else nullcontext():
        exchange(rank)


@pytest.mark.slow
def test_what_the_engines_thread_sends_for_a_launch_is_of_that_launch() -> None:
    for seen in run_ranks(2, send_in_a_thread):
        assert seen == [("send", "backward", "reduce_scatter", "bucket 0", 16.0)]


@pytest.mark.parametrize("name", ["recv_", "barrier"])
def test_silent_operators_are_torchs_own_names(name: str) -> None:
    assert hasattr(torch.ops.c10d, name)
