"""Collectives over a process group, checked by value: torch's own, and ours (comm/base.py) over the same.

full    (N · NUMEL,) fp32 on the device; slice j is rank j's
base    of ours, the same shape: 0, 1, 2, ..., with zeros at the end, where the stamp goes. Rank r sends (r + 1) · base
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...zero.comm.backends import NcclComm, gather_into, scatter_into
from ...zero.comm.base import Comm
from ...zero.comm.connect import connect
from ...zero.comm.desync import STAMP_NUMEL, Stamp

NUMEL = 4096


def check_torch(rank: int, n: int, device: torch.device) -> None:
    """torch's, over the default group. Raises ValueError where a value is not what it must be."""
    expected = n * (n + 1) / 2
    full = torch.full((n * NUMEL,), rank + 1.0, device=device)
    dist.all_reduce(full)
    check_equal("all_reduce", full, torch.full_like(full, expected))
    full, part = torch.full((n * NUMEL,), rank + 1.0, device=device), torch.zeros(NUMEL, device=device)
    scatter_into(part, full)
    check_equal("reduce_scatter", part, torch.full_like(part, expected))
    gather_into(full, torch.full((NUMEL,), rank + 1.0, device=device))
    check_equal("all_gather", full, torch.arange(1.0, n + 1, device=device).repeat_interleave(NUMEL))


def check_ours(rank: int, n: int, device: torch.device) -> None:
    """The engine's, over the default group. Of one rank NCCL's seam, for the engine itself would send nothing there.
    Raises ValueError where a value is not what it must be, RuntimeError where a stamp is not.
    """
    assert dist.group.WORLD is not None
    check_comm(NcclComm(dist.group.WORLD) if n == 1 else connect(dist.group.WORLD, device), device)


def check_comm(comm: Comm, device: torch.device) -> None:
    """Every collective of a seam: in place, into another place, stamped, and the small ones. Raises as check_ours."""
    n, rank, stamp = comm.size, comm.rank, Stamp(3, 5)
    base = torch.arange(float(n * NUMEL), device=device)
    base[-STAMP_NUMEL:] = 0
    total, mine = n * (n + 1) / 2 * base, slice(rank * NUMEL, (rank + 1) * NUMEL)

    full = (rank + 1) * base
    comm.reduce_scatter(full, "unit", stamp).wait()
    _check_values("reduce_scatter", full[mine], total[mine], comm)
    full, into = (rank + 1) * base, torch.zeros_like(base[mine])
    comm.reduce_scatter(full, "unit", stamp, into).wait()
    _check_values("reduce_scatter into another place", into, total[mine], comm)
    full = (rank + 1) * base
    comm.all_gather(full, "unit", stamp).wait()
    factors = torch.arange(1.0, n + 1, device=device).repeat_interleave(NUMEL)
    check_equal("all_gather", full[:-STAMP_NUMEL], (factors * base)[:-STAMP_NUMEL])
    full = (rank + 1) * base
    comm.all_reduce(full, "unit", stamp).wait()
    check_equal("all_reduce", full[:-STAMP_NUMEL], total[:-STAMP_NUMEL])
    _check_small(comm, device)
    for _ in range(2):  # on a GPU stamps go to the host at the first call and are looked at once they are there
        comm.check_stamps()
        if device.type == "cuda":
            torch.cuda.synchronize()


def _check_small(comm: Comm, device: torch.device) -> None:
    """Checks collectives outside of the volume: norms on the device, flags on the Comm's flags_device."""
    n, rank = comm.size, comm.rank
    values = torch.full((3,), rank + 1.0, dtype=torch.float64, device=device)
    comm.sum(values)
    check_equal("sum", values, torch.full_like(values, n * (n + 1) / 2))
    flags = torch.tensor([rank, -rank, 7], dtype=torch.int32, device=comm.flags_device or device)
    comm.maximum(flags)
    check_equal("maximum", flags, torch.tensor([n - 1, 0, 7], dtype=torch.int32, device=flags.device))
    values = torch.full((3,), rank + 1.0, device=device)
    comm.broadcast(values)
    check_equal("broadcast", values, torch.ones_like(values))


def _check_values(name: str, found: torch.Tensor, expected: torch.Tensor, comm: Comm) -> None:
    """Compares the own slice, apart from the stamp at the end of the last rank's."""
    kept = found.numel() - STAMP_NUMEL * (comm.rank == comm.size - 1)
    check_equal(name, found[:kept], expected[:kept])


def check_equal(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises ValueError with the number of wrong values in `found`."""
    if not torch.equal(found, expected):
        wrong = int((found != expected).sum())
        raise ValueError(f"{name}: {wrong} of {found.numel()} values are wrong")
