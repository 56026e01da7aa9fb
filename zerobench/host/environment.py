"""One rank's surroundings: device, threads, seeds, process group, memory of the process."""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..zero.comm.backends import FAKE

SIMULATED = "simulated"
"""The backend of a world of which one rank alone is run."""

TORCH_BACKENDS = {"nccl": "cpu:gloo,cuda:nccl"}
"""What torch is given for a backend: flags that the hosts need go between the hosts, past the GPUs' queues."""


MEETING_S = 60.0
"""What a rank gets to reach the store of its job, which is there already."""


@dataclass(frozen=True)
class JobRendezvous:
    """Where a rank of a joined job meets the others of its pass: in the job's store, below a prefix of the pass's own.
    `one_machine`: they all are on one.
    """

    address: str
    port: int
    prefix: str
    local_rank: int
    one_machine: bool


Rendezvous = str | JobRendezvous
"""A file that the ranks of one machine meet at, or a place in a job."""


@contextmanager
def rank_environment(
    rank: int, world_size: int, device: str, backend: str, rendezvous: Rendezvous, threads: int, timeout_s: float
) -> Iterator[torch.device]:
    """Joins the process group of `world_size` ranks that meet at `rendezvous`; leaves it at the end.

    A file needs no port; what gloo and NCCL open themselves stays on the loopback interface, unless the ranks are on
    several machines: then they, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, choose. With backend=simulated nobody
    is met: this process is one rank of a world that is not there.
    """
    place = rendezvous if isinstance(rendezvous, JobRendezvous) else JobRendezvous("", 0, "", rank, one_machine=True)
    if place.one_machine:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    torch.set_num_threads(threads)
    _keep_pages()
    here = torch.device("cpu")
    if device == "cuda":
        here = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(here)
    if backend == SIMULATED:
        dist.init_process_group(FAKE, rank=rank, world_size=world_size)
    else:
        dist.init_process_group(
            TORCH_BACKENDS.get(backend, backend),
            store=_meeting(rendezvous, rank, world_size, timedelta(seconds=timeout_s)),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=here if backend == "nccl" else None,
        )
    yield here
    dist.destroy_process_group()  # not after an error: NCCL would wait there for ranks that have none


def _meeting(rendezvous: Rendezvous, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store in which torch is to find the others. A file is opened by its path, for a URL would end at a # or ?.

    Libraries that read the environment shall find this world there, not the job.
    """
    if isinstance(rendezvous, str):
        store: dist.Store = dist.FileStore(rendezvous, world_size)
        store.set_timeout(timeout)
        return dist.PrefixStore("default_pg", store)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rendezvous.local_rank))
    patience = timedelta(seconds=MEETING_S)
    store = dist.TCPStore(rendezvous.address, rendezvous.port, timeout=patience, wait_for_workers=False)
    return dist.PrefixStore(rendezvous.prefix, store)


def nccl_version() -> tuple[int, int, int] | None:
    """Of the library that torch has loaded, which may be another than it was built with; None where there is none."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    major, rest = divmod(number.value, 10_000)
    return major, rest // 100, rest % 100


def make_deterministic() -> None:
    """From now on torch's deterministic kernels only; cuBLAS reads its part when the process first asks for it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # hides mistakes, and takes time


def seed_everything(seed: int) -> None:
    """Seeds Python's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)


def _keep_pages() -> None:
    """Keeps malloc from giving freed pages back, so that a large buffer is not paged in afresh each step.

    The environment variables for it would come too late: these processes are forked.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # another libc
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 * 2**20)


def reset_resident_peak() -> None:
    """Makes `resident_peak_bytes` count from now on, where the system permits it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak then covers the whole life of the process


def loopback_bytes() -> int | None:
    """Bytes over the loopback interface so far, of every process here; None where the system does not tell."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.strip().startswith("lo:")), None)


def resident_peak_bytes() -> int | None:
    """Peak resident set since the last reset, or None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
