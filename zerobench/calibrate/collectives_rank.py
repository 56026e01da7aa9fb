"""One rank of a calibration: every collective at every size, interleaved, so that a drift of the machine
affects all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..host.environment import Rendezvous, rank_environment
from ..zero.comm.backends import gather_into, scatter_into
from ..zero.comm.base import Comm
from ..zero.comm.connect import connect

ALIGN_BYTES = 64
WARMUP = 2
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class CalibrationJob:
    """The work of one rank. `sizes`: bytes of the full tensor, rounded up so that its slices are equal."""

    rank: int
    world_size: int
    device: str
    rendezvous: Rendezvous
    dtype: str
    sizes: tuple[int, ...]
    repetitions: int
    timeout_s: float


def _own(full: torch.Tensor) -> torch.Tensor:
    return full.chunk(dist.get_world_size())[dist.get_rank()]


TRANSFERS: dict[tuple[str, str], Callable[[Comm, torch.Tensor], Any]] = {
    ("seam", "reduce_scatter"): lambda comm, full: comm.reduce_scatter(full).wait(),
    ("seam", "all_gather"): lambda comm, full: comm.all_gather(full).wait(),
    ("seam", "all_reduce"): lambda comm, full: comm.all_reduce(full).wait(),
    ("seam", "broadcast"): lambda comm, full: comm.broadcast(full),
    ("torch", "reduce_scatter"): lambda comm, full: scatter_into(_own(full), full),
    ("torch", "all_gather"): lambda comm, full: gather_into(full, _own(full)),
    ("torch", "all_reduce"): lambda comm, full: dist.all_reduce(full),
    ("memory", "copy"): lambda comm, full: full[: full.numel() // 2].copy_(full[full.numel() // 2 :]),
}
"""(via, collective) -> the transfer of a full tensor. A copy reads one half and writes the other."""


def evenly(size: int, world_size: int) -> int:
    """Rounds `size` bytes up to whole, aligned slices."""
    step = ALIGN_BYTES * world_size * 2
    return -(-size // step) * step


def calibrate_rank(job: CalibrationJob, tell: Callable[[int], None]) -> list[dict[str, Any]]:
    """Returns this rank's times: via, collective, bytes, repetition, seconds. `tell` receives the number of finished
    rounds.
    """
    surroundings = rank_environment(
        job.rank,
        job.world_size,
        job.device,
        "nccl" if job.device == "cuda" else "gloo",
        job.rendezvous,
        1,
        job.timeout_s,
    )
    rows = []
    with surroundings as device, torch.no_grad():
        comm = connect(None, device)
        dtype = getattr(torch, job.dtype)
        for repetition in range(-WARMUP, job.repetitions):
            for size in job.sizes:
                full = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
                for (via, collective), transfer in TRANSFERS.items():
                    seconds = _time(transfer, comm, full)
                    if repetition >= 0:
                        where = {"via": via, "collective": collective, "bytes": size}
                        rows.append(where | {"repetition": repetition, "seconds": seconds})
            if job.rank == 0:
                tell(repetition + WARMUP + 1)
    return rows


def _time(transfer: Callable[[Comm, torch.Tensor], Any], comm: Comm, full: torch.Tensor) -> float:
    """Returns the time from when all ranks are ready until this one is done."""
    full.zero_()
    if comm.size > 1:
        dist.barrier()
    _finish(full)
    begun = time.perf_counter()
    transfer(comm, full)
    _finish(full)
    return time.perf_counter() - begun


def _finish(full: torch.Tensor) -> None:
    if full.is_cuda:
        torch.cuda.synchronize(full.device)
