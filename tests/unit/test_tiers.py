"""Tiers in the probes: bytes of each apart, copies between them, files; and that who is not asked changes nothing."""

import torch

from tests.cells import cell
from zerobench.config.schema_memory import CpuOffload
from zerobench.probes import AccountedPass
from zerobench.records import MemoryRow
from zerobench.zero import labels

CPU = torch.device("cpu")


def most(probe: AccountedPass) -> dict[tuple[str, str], int]:
    rows: list[MemoryRow] = probe.memory_rows(0)
    return {(r.tier, r.category): r.max_bytes for r in rows if r.phase == "step" and r.max_bytes}


def test_bytes_are_told_apart_by_tier() -> None:
    with AccountedPass(CPU) as probe, probe.step(measured=True), probe.phase("update"):
        kept = labels.label(torch.zeros(100), labels.MASTER, "m", tier=labels.HOST)
        labels.file("optimizer", labels.OPTIMIZER, 4000)
        with labels.on_tier(labels.HOST):
            torch.zeros(50)
        torch.zeros(10)
        labels.file("optimizer", labels.OPTIMIZER, -1000)
        labels.file("optimizer", labels.OPTIMIZER, 500)
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
    assert found == {
        ("backward", "down"): (64, "g", 0),
        ("update", "up"): (128, "", 0),
        ("update", "read"): (8192, "tile", 0),
    }


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


def test_a_part_of_the_optimizer_needs_an_optimizer_that_leaves() -> None:
    words = "offload.fraction: 0.5 is a part of the optimizer; let the optimizer leave"
    assert cell("zero2", 2, offload=CpuOffload(optimizer=False, fraction=0.5)).problems == (words,)
    assert not cell("zero2", 2, offload=CpuOffload(fraction=0.5)).problems
