"""The ledger and the traffic meter on their own: lives, sizes, labels; bytes of logical tensors, in a world of two."""

import threading
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.ranks import run_ranks
from zerobench.probes import AccountedPass
from zerobench.probes.ledger import Ledger
from zerobench.probes.traffic import TrafficMeter
from zerobench.records import MemoryRow
from zerobench.zero import labels


@pytest.fixture
def ledger():
    one = Ledger()
    labels.listen(one)
    with one:
        yield one
    labels.unlisten(one)


def stretch(ledger: Ledger, work) -> dict[str, int]:
    ledger.begin()
    work()
    ledger.end("all")
    return {k: v for k, v in ledger.sums.extremes["all"].highest.items() if v}


def test_a_storage_counts_once_and_only_while_it_lives(ledger: Ledger) -> None:
    def work() -> None:
        ledger.enter_phase("forward")
        a = torch.empty(1000)
        b = a.view(10, 100)[3:5]
        del a
        c = torch.empty(500)
        del b, c
        torch.empty(1200)

    assert stretch(ledger, work) == {"activations": 6000}


def test_the_first_label_holds_from_birth_and_a_second_from_then_on(ledger: Ledger) -> None:
    ledger.enter_phase("backward")

    def work() -> None:
        with torch.no_grad():
            a = torch.empty(1000)
            scratch = torch.empty(100)
            labels.label(a, labels.GRADIENTS, "a")
            del scratch
            labels.label(a, labels.COMMUNICATION, "a")
            torch.empty(50)

    assert stretch(ledger, work) == {"gradients": 4000, "temporary": 400, "communication": 4000}
    assert ledger.sums.extremes["all"].peak == 4400


def test_the_largest_tensors_are_those_of_the_peak(ledger: Ledger) -> None:
    def work() -> None:
        small = torch.empty(100)
        torch.empty(1000)
        last = torch.empty(400)
        del small, last

    stretch(ledger, work)
    assert [size for size, *_ in ledger.sums.extremes["all"].alive] == [4000, 400]


def test_memory_that_is_asked_for_is_counted_and_so_is_what_outlives_its_phase(ledger: Ledger) -> None:
    slot = torch.empty(1000)
    labels.label(slot, labels.GRADIENTS, "a slot")
    shard = torch.empty(10)
    labels.label(shard, labels.GRADIENTS, "a shard")
    shard.untyped_storage().resize_(0)

    def work(again: bool) -> None:
        ledger.enter_phase("forward")
        kept, short = torch.empty(100), torch.empty(100)
        slot.view(10, 100).fill_(1.0)  # what is there is no birth
        del short
        ledger.enter_phase("backward")
        del kept
        full = torch.empty(50)
        labels.label(full, labels.GRADIENTS, "full")
        del full
        shard.untyped_storage().resize_(40)
        if again:
            torch.empty(7)
        ledger.enter_phase("update")
        shard.untyped_storage().resize_(0)

    with torch.no_grad():
        stretch(ledger, lambda: work(again=False))
        stretch(ledger, lambda: work(again=True))
    seen = ledger.sums.extremes["all"]
    assert seen.made == {"activations": 2, "gradients": 2, "temporary": 1}, "the most of any stretch"
    assert +seen.lasting == {"activations": 1, "gradients": 1}
    assert ledger.sums.extremes["forward"].made is None, "of whole stretches alone"


def test_recomputation_makes_activations_and_backward_makes_temporaries(ledger: Ledger) -> None:
    ledger.enter_phase("backward")

    def work() -> None:
        with torch.enable_grad():
            torch.empty(300)
        with torch.no_grad():
            torch.empty(200)

    assert stretch(ledger, work) == {"activations": 1200, "temporary": 800}


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


@pytest.mark.parametrize("name", ["recv_", "barrier"])
def test_silent_operators_are_torchs_own_names(name: str) -> None:
    assert hasattr(torch.ops.c10d, name)


CPU = torch.device("cpu")


def most(probe: AccountedPass) -> dict[tuple[str, str], int]:
    rows: list[MemoryRow] = probe.memory_rows(0)
    return {(r.tier, r.category): r.max_bytes for r in rows if r.phase == "step" and r.max_bytes}


def test_bytes_are_told_apart_by_tier() -> None:
    with AccountedPass(CPU) as probe, probe.step(measured=True), probe.phase("update"):
        kept = labels.label(torch.zeros(100), labels.MASTER, "m", tier=labels.HOST)
        labels.file("states.bin", "optimizer", labels.OPTIMIZER, 4000)
        with labels.on_tier(labels.HOST):
            torch.zeros(50)
        torch.zeros(10)
        labels.file("states.bin", "optimizer", labels.OPTIMIZER, 3000)
        labels.file("states.bin", "optimizer", labels.OPTIMIZER, 3500)
    assert most(probe) == {
        ("device", "temporary"): 40,
        ("device", "total"): 40,
        ("host", "master"): 400,
        ("host", "temporary"): 200,
        ("host", "states"): 400,
        ("host", "total"): 600,
        ("device", "allocated"): 600,  # torch's CPU allocator has both tiers
        ("nvme", "optimizer"): 4000,
        ("nvme", "states"): 4000,
        ("nvme", "total"): 4000,
    }
    assert {r.tier for r in probe.memory_rows(0) if r.phase == "update"} == {"device", "host", "nvme"}
    last = probe.timeline_rows(0)[-1]
    assert (last.host_bytes, last.nvme_bytes, last.temporary_bytes) == (400, 3500, 0)
    del kept


def test_copies_between_tiers_are_listed_with_their_bytes() -> None:
    with AccountedPass(CPU) as probe, probe.step(measured=True):
        device = torch.zeros(64, dtype=torch.bfloat16)
        other = torch.ones(64, dtype=torch.bfloat16)
        host = labels.label(torch.zeros(64, dtype=torch.bfloat16), labels.GRADIENTS, "g", tier=labels.HOST)
        wide = labels.label(torch.zeros(64), labels.MASTER, "w", tier=labels.HOST)
        with probe.phase("backward"):
            host[:32].copy_(device[:32])  # down, 2 bytes each
            wide.copy_(host)  # within a tier: nothing
            other.copy_(device)  # likewise
        with probe.phase("update"):
            device.copy_(wide)  # up: cast where it comes from
            labels.transfer(labels.READ, 8192, "tile")
    found = {(r.phase, r.kind): (r.payload_bytes, r.unit, r.volume_elements) for r in probe.traffic_rows(0)}
    updates = {("update", "up"): (128, "", 0), ("update", "read"): (8192, "tile", 0)}
    assert found == {("backward", "down"): (64, "g", 0), **updates}


def test_batches_flags_and_stamps_are_no_bytes_of_a_tier() -> None:
    with AccountedPass(CPU) as probe, probe.step(measured=True):
        host = labels.label(torch.zeros(8), labels.INPUTS, "batch", tier=labels.HOST)
        with probe.phase("data"):
            torch.zeros(8).copy_(host)
        with probe.phase("forward"), labels.collective("all_gather", "unit"):
            torch.zeros(8).copy_(host)
        with probe.phase("update"):
            torch.zeros(()).copy_(host[0])
            torch.zeros(1).copy_(host[:1])
    found = [(r.phase, r.kind, r.payload_bytes, r.control) for r in probe.traffic_rows(0)]
    assert sorted(found) == [
        ("data", "up", 32, True),
        ("forward", "up", 32, True),
        ("update", "up", 4, False),
        ("update", "up", 4, True),
    ]
