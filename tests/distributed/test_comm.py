"""The seam: what the collectives put where, to the bit, and what they say when ranks are at different places."""

from __future__ import annotations

import time
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from zerobench.zero.comm import gloo
from zerobench.zero.comm.backends import NcclComm
from zerobench.zero.comm.base import Comm
from zerobench.zero.comm.desync import STAMP_NUMEL, DeferredStamps, Stamp, sums_are_exact
from zerobench.zero.comm.hierarchical import connect
from zerobench.zero.comm.streams import Handle

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


def all_reduce_and_control(rank: int, n: int) -> None:
    comm = connect(None, torch.device("cpu"))
    full = torch.arange(16.0 * n) + rank
    comm.all_reduce(full, "unit").wait()
    assert torch.equal(full, n * torch.arange(16.0 * n) + sum(range(n)))
    norms, flags = torch.tensor([rank + 0.5], dtype=torch.float64), torch.tensor([rank, -rank])
    comm.sum(norms)
    comm.maximum(flags)
    assert norms.item() == sum(r + 0.5 for r in range(n))
    assert flags.tolist() == [n - 1, 0]
    last = weakref.ref(flags)
    del flags  # gloo's thread lets go of it at a time of its own; the seam keeps it until the next
    time.sleep(0.05)
    assert last() is not None


def equal_stamps_pass(rank: int, n: int) -> None:
    comm = connect(None, torch.device("cpu"))
    for dtype in DTYPES:
        for unit, step in ((0, 0), (65535, 65535), (0xABC, 3 * 65536 + 7)):
            stamp = Stamp(unit, step)
            full = random_full(rank, n, dtype)
            comm.reduce_scatter(full, "unit", stamp).wait()
            last = full[:-STAMP_NUMEL] if rank == n - 1 else full
            own = slice(rank * NUMEL, (rank + 1) * NUMEL)
            assert torch.equal(last[own], sum_in_rank_order(n, dtype)[: last.numel()][own])
            comm.all_gather(full, "unit", stamp).wait()
            assert full[-STAMP_NUMEL:].tolist() == stamp.digits()
            comm.all_reduce(random_full(rank, n, dtype), "unit", stamp).wait()


def everything(rank: int, n: int) -> None:
    in_flight_together(rank, n)
    all_reduce_and_control(rank, n)
    equal_stamps_pass(rank, n)
    collectives(rank, n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_collectives_put_the_same_bits_on_every_run(n: int) -> None:
    run_ranks(n, everything)


def diverges(rank: int, n: int, who: int, field: str, dtype: torch.dtype, kind: str) -> str:
    """Rank `who` is at the next unit or step. Every rank says what it heard, or nothing."""
    comm = connect(None, torch.device("cpu"))
    ahead = int(rank == who)
    stamp = Stamp(3 + ahead * (field == "unit"), 65535 + ahead * (field == "step"), lambda unit: f"blocks.{unit}")
    handle = getattr(comm, kind)(torch.zeros(n * NUMEL, dtype=dtype), "unit", stamp)
    try:
        handle.wait()
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def every_divergence(rank: int, n: int) -> dict[tuple[object, ...], str]:
    cases = [(who, field, dtype, kind) for who in range(n) for field in ("unit", "step") for dtype in DTYPES
             for kind in ("reduce_scatter", "all_gather", "all_reduce")]  # fmt: skip
    return {case: diverges(rank, n, *case) for case in cases}


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_at_different_places_hear_of_it(n: int) -> None:
    heard = run_ranks(n, every_divergence)
    last = n - 1
    here = {"unit": "blocks.3 of step 65535", "step": "blocks.3 of step 65535"}
    there = {"unit": "blocks.4 of step 65535", "step": "blocks.3 of step 65536"}
    why = "all ranks must run the same modules in the same order"
    for (who, field, dtype, kind), _ in heard[0].items():
        case = [rank[who, field, dtype, kind] for rank in heard]
        if kind == "all_reduce":
            assert all(words.startswith("another rank is elsewhere, this rank at blocks.") for words in case), case
        elif kind == "reduce_scatter":  # the last rank looks at all others
            other, mine = (there, here) if who != last else (here, there)
            who_else = who if who != last else 0
            assert case[last] == f"rank {who_else} is at unit {other[field]}, this rank at {mine[field]}: {why}"
            assert not any(case[:last])
        else:  # all others look at the last rank
            assert case[last] == ""
            for rank in range(last):
                if who == last:
                    assert case[rank] == f"rank {last} is at unit {there[field]}, this rank at {here[field]}: {why}"
                else:
                    assert bool(case[rank]) == (rank == who)


def stops_at_a_mismatch(rank: int, n: int) -> None:
    comm = connect(None, torch.device("cpu"))
    for step in range(3):
        stamp = Stamp(rank if step == 1 else 0, step)
        comm.reduce_scatter(torch.zeros(n * NUMEL), "unit", stamp).wait()
        dist.barrier()


def test_a_mismatch_ends_the_run_with_its_sentence() -> None:
    with pytest.raises(
        AssertionError, match="rank 1 raised DesyncError: rank 0 is at unit 0 of step 1, this rank at 1"
    ):
        run_ranks(2, stops_at_a_mismatch)


def no_stamp_and_a_dead_peer(rank: int, n: int) -> str:
    comm = connect(None, torch.device("cpu"))
    stamp = Stamp(1, 1) if rank else None
    try:
        comm.reduce_scatter(torch.full((n * NUMEL,), 0.5), "unit", stamp).wait()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_missing_stamp_is_named() -> None:
    assert run_ranks(2, no_stamp_and_a_dead_peer)[1].startswith("rank 0 sent no stamp, this rank at 1 of step 1")


def test_digits_and_the_dtypes_that_hold_their_sums() -> None:
    assert Stamp(0x12AF, 65536 + 0x0304).digits() == [1, 2, 10, 15, 0, 3, 0, 4]
    for dtype in DTYPES:
        full = torch.zeros(16, dtype=dtype)
        Stamp(0x12AF, 0x0304).write(full)
        assert full.tolist() == [0.0] * 8 + [1, 2, 10, 15, 0, 3, 0, 4]
    assert [n for n in (2, 17, 18, 1024) if sums_are_exact(torch.bfloat16, n)] == [2, 17]
    assert sums_are_exact(torch.float16, 128)
    assert sums_are_exact(torch.float32, 2**20)
    exact = torch.tensor([15.0]).bfloat16() * 17
    assert exact.item() == 15 * 17


def test_a_world_of_one_moves_nothing() -> None:
    full = torch.ones(16)
    for collective in (Comm().reduce_scatter, Comm().all_gather, Comm().all_reduce):
        collective(full, "unit", Stamp(1, 1)).wait()
    Comm().sum(full)
    Comm().check_stamps()
    assert torch.equal(full, torch.ones(16))


def test_stamps_on_a_device_are_checked_at_the_end_of_a_step() -> None:
    """Without a GPU: the checks that `wait` puts aside, on buffers as NCCL would leave them."""
    comm = object.__new__(NcclComm)
    comm.size, comm.is_last, comm._stamps = 3, False, DeferredStamps()
    gathered, summed = torch.zeros(32), torch.zeros(32)
    Stamp(5, 9).write(gathered)
    Stamp(5, 9).write(summed)
    summed *= 3
    for stamp in (Stamp(5, 9), Stamp(6, 9)):
        comm._check_end(gathered, partial(stamp.check, 2))
        comm._check_end(summed, comm._check_of_sum(summed, Stamp(5, 9)))
    with pytest.raises(RuntimeError, match="rank 2 is at unit 5 of step 9, this rank at 6 of step 9"):
        comm.check_stamps()
    comm.check_stamps()
    comm._check_end(summed, comm._check_of_sum(summed, Stamp(5, 8)))
    with pytest.raises(RuntimeError, match="another rank is elsewhere, this rank at 5 of step 8"):
        comm.check_stamps()
