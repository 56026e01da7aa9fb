"""One rank's environment: device, threads, seeds, process group, memory of the process; CPU time of other processes,
beside which times cannot be compared.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

from ..zero.comm.base import FAKE as FAKE_GROUP
from .store import GLOO_AT, check_gloo_interface, interface_toward, reachable

SIMULATED = "simulated"
"""The backend of a world of which only one rank runs."""

FAKE = "fake"
"""Tensors of a simulated world without values and memory."""

TORCH_BACKENDS = {"nccl": "cpu:gloo,cuda:nccl"}
"""torch's name of a backend: with NCCL, flags that the host reads are sent between hosts, bypassing the GPU queues."""


MEETING_S = 60.0
"""Time, in seconds, for a rank to connect to the existing store of its job."""


@dataclass(frozen=True)
class JobRendezvous:
    """The meeting point of a joined job's ranks in one pass: the job's store, with a prefix per pass."""

    address: str
    port: int
    prefix: str
    local_rank: int
    one_machine: bool


Rendezvous = str | JobRendezvous
"""A file, for the ranks of one machine, or a place in a job's store."""


@contextmanager
def rank_environment(
    rank: int, world_size: int, device: str, backend: str, rendezvous: Rendezvous, threads: int, timeout_s: float
) -> Iterator[torch.device]:
    """Joins the process group of `world_size` ranks that meet at `rendezvous`; leaves it at the end.

    A file needs no port. Sockets of gloo and NCCL stay on the loopback interface unless the ranks are on several
    machines; then gloo uses the interface that reaches the job's address, and NCCL chooses its own. GLOO_SOCKET_IFNAME
    and NCCL_SOCKET_IFNAME take precedence. With backend=simulated there is no rendezvous: this process is one rank of a
    simulated world.
    """
    meeting = rendezvous if isinstance(rendezvous, JobRendezvous) else JobRendezvous("", 0, "", rank, one_machine=True)
    if meeting.one_machine:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault(GLOO_AT, loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    elif (interface := interface_toward(meeting.address)) is not None:
        os.environ.setdefault(GLOO_AT, interface)
    torch.set_num_threads(threads)
    _keep_pages()
    here = torch.device("cpu")
    if device == "cuda":
        here = torch.device("cuda", meeting.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(here)
    with ExitStack() as undo:
        # starting a group wraps the hook for the prefix "[rank0]: ", again for each cell that this process runs
        undo.callback(setattr, sys, "excepthook", sys.excepthook)
        if backend == SIMULATED:
            dist.init_process_group(FAKE_GROUP, rank=rank, world_size=world_size)
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
    if dist.is_initialized():  # not after an error: NCCL would wait there for ranks that no longer answer
        dist.destroy_process_group()


def _meeting(rendezvous: Rendezvous, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Returns the store in which torch finds the other ranks. A file is opened by its path, as bytes, since a name need
    not be UTF-8; a URL would end at # or ?.

    RANK and similar variables are set, so that libraries that read them see this world, not the job. Raises
    RuntimeError if gloo's network interface is missing.
    """
    check_gloo_interface()
    if isinstance(rendezvous, str):
        store: dist.Store = dist.FileStore(os.fsencode(rendezvous), world_size)  # type: ignore[arg-type]
        store.set_timeout(timeout)
        return dist.PrefixStore("default_pg", store)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rendezvous.local_rank))
    patience = timedelta(seconds=MEETING_S)
    store = dist.TCPStore(reachable(rendezvous.address), rendezvous.port, timeout=patience, wait_for_workers=False)
    return dist.PrefixStore(rendezvous.prefix, store)


def nccl_version() -> tuple[int, int, int] | None:
    """Returns the version of the NCCL that is loaded, which may differ from the build's; None without NCCL."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    major, rest = divmod(number.value, 10_000)
    return major, rest // 100, rest % 100


def make_deterministic() -> None:
    """Restricts torch to deterministic kernels; cuBLAS reads its setting when the process first uses it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # hides mistakes, and takes time


def seed_everything(seed: int) -> None:
    """Seeds Python's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)


def _keep_pages() -> None:
    """Keeps malloc from returning freed pages, so that a large buffer is not faulted in again each step.

    The environment variables for it would be read too early: these processes are forked.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # a libc without mallopt
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 * 2**20)


def reset_resident_peak() -> None:
    """Makes `resident_peak_bytes` count from now on, if the system permits it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak then covers the whole life of the process


def loopback_bytes() -> int | None:
    """Returns the bytes over the loopback interface so far, of all processes; None if the system has no "lo"."""
    loopback = psutil.net_io_counters(pernic=True, nowrap=False).get("lo")
    return None if loopback is None else loopback.bytes_recv


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(_usable())


def _usable() -> set[int]:
    """Returns the numbers of these cores; all, if the system has no affinity, such as macOS."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:
        return set(range(psutil.cpu_count() or 1))


OMP_THREADS = "OMP_NUM_THREADS"


def exported_threads() -> int | None:
    """Returns the threads per process that the user exports in OMP_NUM_THREADS; None if there is no such number.

    torchrun sets the variable to 1 if it is not exported. Only torchrun's own environment, the parent's, tells the two
    apart.
    """
    first = os.environ.get(OMP_THREADS, "").partition(",")[0].strip()  # more numbers are of nested regions
    if not (first.isdecimal() and int(first) > 0):
        return None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(psutil.Error):
            if OMP_THREADS not in psutil.Process(os.getppid()).environ():
                return None
    return int(first)


def machine_bytes() -> int:
    """Returns this machine's memory, or the part of it that control groups (containers, SLURM) allow this process."""
    sizes = [psutil.virtual_memory().total]
    for inner, limit, _ in _memory_groups():
        for folder in (inner, *inner.parents):
            with suppress(OSError, ValueError):  # "max", or no such group in this namespace
                sizes.append(int((folder / limit).read_text()))
    return min(sizes)


def memory_kills() -> int:
    """Returns the number of processes that the kernel has killed for lack of memory: in this process's control group,
    which other jobs on the machine do not affect, or on the whole machine if no group counts them.
    """
    for file in (*(inner / events for inner, _, events in _memory_groups()), Path("/proc/vmstat")):
        with suppress(OSError, StopIteration):  # no such group in this namespace, or a kernel that does not count
            return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill "))
    return 0


V1 = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.oom_control"
V2 = "/sys/fs/cgroup", "memory.max", "memory.events"
"""Mount point of a version of control groups, and its files with a group's limit and events."""


def _memory_groups() -> Iterator[tuple[Path, str, str]]:
    """Yields this process's control groups that limit memory: folder, file of the limit, file of the events."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for kinds, group in (line.split(":", 2)[1:] for line in lines):
        if not kinds or "memory" in kinds.split(","):
            root, limit, events = V1 if kinds else V2
            yield Path(root, group.strip("/")), limit, events


def gpu_bytes() -> int:
    """Returns the memory of this machine's smallest GPU."""
    return min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count()))


def data_bytes() -> int:
    """Returns the bytes of private writable memory that this process has mapped, as RLIMIT_DATA counts them, or its
    whole address space if the system does not report them.
    """
    size = _of_status("VmData:")
    return int(psutil.Process().memory_info().vms) if size is None else size


def resident_peak_bytes() -> int | None:
    """Returns the peak resident set since the last reset, or None if the system does not report it."""
    return _of_status("VmHWM:")


def _of_status(field: str) -> int | None:
    """Returns a size from Linux's status of this process, in bytes; None on other systems."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)


BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""Kinds of CPU time in which a core is busy; `steal`: for another machine on the same host. `user` includes guests."""


class _Reading(NamedTuple):
    at: float
    cores_s: float
    own_s: float


class OtherProcesses:
    """CPU time of other processes since creation, on the cores that this process may use: the cores' minus that of this
    process and its descendants.
    """

    def __init__(self) -> None:
        self._before = _read()

    def cores(self) -> float | None:
        """Returns the average number of cores that they kept busy; None if no time has passed."""
        now, before = _read(), self._before
        if now.at <= before.at:
            return None
        busy = (now.cores_s - before.cores_s) - (now.own_s - before.own_s)
        return max(0.0, busy / (now.at - before.at))


def _read() -> _Reading:
    usable = _usable()
    cores = [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in usable]
    me = psutil.Process()
    own = 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended: its time is its parent's now
            own += sum(process.cpu_times()[:4])  # its own, and that of children which have ended
    busy = sum(getattr(times, kind, 0.0) for times in cores for kind in BUSY)
    return _Reading(time.monotonic(), busy, own)
