"""The seam: what the collectives put where, to the bit; and a backend's own collectives, as on a GPU."""

import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerobench
from tests.distributed.streams import ModeledCuda
from tests.ranks import run_ranks
from zerobench.zero.comm import backends, base, gloo, hierarchical
from zerobench.zero.comm.base import Comm, Handle
from zerobench.zero.comm.hierarchical import connect
from zerobench.zero.comm.out_of_step import hang_watch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NUMEL = 16 * 33


def random_full(rank: int, n: int, dtype: torch.dtype, numel: int = NUMEL) -> torch.Tensor:
    """Values that `rank` contributes, (n · numel,); any rank can make any other's."""
    return torch.randn(n * numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sum_in_rank_order(n: int, dtype: torch.dtype, numel: int = NUMEL) -> torch.Tensor:
    total = random_full(0, n, dtype, numel)
    for rank in range(1, n):
        total += random_full(rank, n, dtype, numel)
    return total


def collectives(rank: int, n: int) -> None:
    comm = connect(None, torch.device("cpu"))
    for size, gloo.SLOTS in ((2**20, 4), (256, 2), (192, 3), (64, 16)):
        gloo.GATHER_PIECE_BYTES = gloo.REDUCE_PIECE_BYTES = size
        for dtype in DTYPES:
            whole = sum_in_rank_order(n, dtype)
            full = random_full(rank, n, dtype)
            before = full.clone()
            comm.reduce_scatter(full).wait()
            own = slice(rank * NUMEL, (rank + 1) * NUMEL)
            assert torch.equal(full[own], whole[own]), (dtype, size)
            before[own] = whole[own]
            assert torch.equal(full, before)
            comm.all_gather(full).wait()
            assert torch.equal(full, whole)


def in_flight_together(rank: int, n: int) -> None:
    """Reductions and gathers under way at once neither mix nor depend on who waits first; tensors are let go of."""
    gloo.GATHER_PIECE_BYTES = gloo.REDUCE_PIECE_BYTES = 1024
    comm = connect(None, torch.device("cpu"))
    sizes = [16 * k for k in (1, 200, 3, 77, 500)]
    reduced = [random_full(rank, n, torch.float32, size) for size in sizes]
    gathered = [random_full(rank, n, torch.float32, size) for size in sizes]
    handles: list[tuple[Handle, Handle]] = []
    for one, other in zip(reduced, gathered, strict=True):
        handles.append((comm.reduce_scatter(one), comm.all_gather(other)))
    for reduction, gather in handles[::-1] if rank == 0 else handles:
        gather.wait()
        reduction.wait()
        reduction.wait()
    for size, one, other in zip(sizes, reduced, gathered, strict=True):
        own = slice(rank * size, (rank + 1) * size)
        assert torch.equal(one[own], sum_in_rank_order(n, torch.float32, size)[own])
        for owner in range(n):
            theirs = slice(owner * size, (owner + 1) * size)
            assert torch.equal(other[theirs], random_full(owner, n, torch.float32, size)[theirs])


def control(rank: int, n: int) -> None:
    comm, flags = connect(None, torch.device("cpu")), torch.tensor([rank, -rank])
    comm.maximum(flags)
    last = weakref.ref(flags)
    del flags  # gloo's thread lets go of it at a time of its own; the seam keeps it until the next
    time.sleep(0.05)
    assert last() is not None


def agreement_of_hosts(rank: int, n: int) -> None:
    """Flags of a group without a CPU's backend, in a ring and by rank 0; each CPU group is made once."""
    world = dist.group.WORLD
    assert world is not None
    with (
        mock.patch.dict(hierarchical.KINDS, {("gloo", "cpu"): lambda group: backends.NcclComm(group, ModeledCuda())}),
        mock.patch.object(base, "backend_for", lambda device, group: "gloo" if group is not world else ""),
    ):
        comm, other = (hierarchical.connect_groups(None, torch.device("cpu"), None, None) for _ in range(2))
        assert comm.flags_device == other.flags_device == torch.device("cpu")
        assert len(hierarchical._cpu_groups) == 1
        assert {world, hierarchical._cpu_groups[world]} <= {*hang_watch(world).groups}
        for tree_from in (n, n + 1):
            with mock.patch.object(base, "TREE_FROM", tree_from):
                flags = torch.tensor([rank, -rank, 7], dtype=torch.int32)
                comm.maximum(flags)
                assert flags.tolist() == [n - 1, 0, 7]


def small_halves(rank: int, n: int) -> None:
    """A gradient of twice the smallest number of fp16 is not lost in a mean of 4 ranks, nor is a large sum infinite."""
    model = nn.Linear(8, 1, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = zerobench.initialize(model, optimizer, "zero2")
    for value in (2.0**-23, 2.0**14):
        engine.backward((engine(torch.ones(1, 8).half()) * value).sum())
        mean = engine.full_gradient("weight")
        assert mean is not None
        assert mean.unique().tolist() == [value]
        engine.zero_grad()


def check_comm(comm: Comm, device: torch.device) -> None:
    """Every collective: in place, into another tensor; norms on the device, flags on flags_device."""
    n, rank = comm.size, comm.rank
    base = torch.arange(float(n * NUMEL), device=device)
    total, part, own = n * (n + 1) / 2 * base, slice(rank * NUMEL, (rank + 1) * NUMEL), (rank + 1) * base
    full, into = own.clone(), torch.zeros_like(base[part])
    comm.reduce_scatter(full, "unit").wait()
    assert torch.equal(full[part], total[part])
    comm.reduce_scatter(own.clone(), "unit", into).wait()
    assert torch.equal(into, total[part])
    full = own.clone()
    comm.all_gather(full, "unit").wait()
    assert torch.equal(full, torch.arange(1.0, n + 1, device=device).repeat_interleave(NUMEL) * base)
    comm.all_reduce(own, "unit").wait()
    assert torch.equal(own, total)
    norms = torch.full((3,), rank + 1.0, dtype=torch.float64, device=device)
    comm.sum(norms)
    assert norms.tolist() == [n * (n + 1) / 2] * 3
    flags = torch.tensor([rank, -rank, 7], dtype=torch.int32, device=comm.flags_device or device)
    comm.maximum(flags)
    assert flags.tolist() == [n - 1, 0, 7]
    values = torch.full((3,), rank + 1.0, device=device)
    comm.broadcast(values)
    assert values.tolist() == [1.0] * 3


def everything(rank: int, n: int) -> None:
    """A backend's own collectives, as on a GPU, too: staged in host memory, and in lanes."""
    cpu, world = torch.device("cpu"), dist.group.WORLD
    for comm in (connect(None, cpu), backends.StagedComm(world), backends.NcclComm(world, ModeledCuda())):
        check_comm(comm, cpu)
    in_flight_together(rank, n)
    control(rank, n)
    agreement_of_hosts(rank, n)
    if n == 4:
        small_halves(rank, n)
    collectives(rank, n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_collectives_put_the_same_bits_on_every_run(n: int) -> None:
    run_ranks(n, everything)


def test_a_world_of_one_moves_nothing() -> None:
    full = torch.ones(16)
    for collective in (Comm().reduce_scatter, Comm().all_gather, Comm().all_reduce):
        collective(full, "unit").wait()
    Comm().sum(full)
    assert torch.equal(full, torch.ones(16))
