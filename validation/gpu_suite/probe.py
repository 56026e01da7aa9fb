"""Section 1: the process groups that work here. Each is tried in processes of its own: a hang or a crash is a result.

A rank sends tensors through torch's collectives, or through ours (comm/base.py), and checks every value it receives:

full    (N · NUMEL,) fp32 on the device; slice j is rank j's
base    our own, same shape: 0, 1, 2, .... Rank r sends (r + 1) · base
"""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from zerobench.config.world import NCCL_SHARES
from zerobench.host.environment import nccl_version, rank_environment
from zerobench.probes.nvidia_smi import ask, name_of
from zerobench.results.provenance import versions
from zerobench.sizes import show_bytes
from zerobench.zero.comm.backends import NcclComm, gather_into, scatter_into
from zerobench.zero.comm.base import Comm
from zerobench.zero.comm.hierarchical import connect

from .suite import SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable, SuiteTask, padded

LIMIT_S = 45.0
"""Time limit: the first process on a new machine reads CUDA's libraries from a cold disk."""

SHARED = {NCCL_SHARES: "1"}
"""Permits NCCL from 2.30 on to put two ranks on one GPU."""

Check = Callable[[int, int, torch.device], None]
"""Takes rank, ranks and device; raises if a collective returns a wrong value."""


NUMEL = 4096


def check_torch(rank: int, n: int, device: torch.device) -> None:
    """torch's, over the default group. Raises ValueError if a value is not what it must be."""
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
    Raises ValueError if a value is not what it must be.
    """
    assert dist.group.WORLD is not None
    check_comm(NcclComm(dist.group.WORLD) if n == 1 else connect(dist.group.WORLD, device), device)


def check_comm(comm: Comm, device: torch.device) -> None:
    """Every collective of a seam: in place, into another place, and the small ones. Raises as check_ours."""
    n, rank = comm.size, comm.rank
    base = torch.arange(float(n * NUMEL), device=device)
    total, mine = n * (n + 1) / 2 * base, slice(rank * NUMEL, (rank + 1) * NUMEL)

    full = (rank + 1) * base
    comm.reduce_scatter(full, "unit").wait()
    check_equal("reduce_scatter", full[mine], total[mine])
    full, into = (rank + 1) * base, torch.zeros_like(base[mine])
    comm.reduce_scatter(full, "unit", into).wait()
    check_equal("reduce_scatter into another place", into, total[mine])
    full = (rank + 1) * base
    comm.all_gather(full, "unit").wait()
    factors = torch.arange(1.0, n + 1, device=device).repeat_interleave(NUMEL)
    check_equal("all_gather", full, factors * base)
    full = (rank + 1) * base
    comm.all_reduce(full, "unit").wait()
    check_equal("all_reduce", full, total)
    _check_small(comm, device)


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


def check_equal(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises ValueError with the number of wrong values in `found`."""
    if not torch.equal(found, expected):
        wrong = int((found != expected).sum())
        raise ValueError(f"{name}: {wrong} of {found.numel()} values are wrong")


FIELDS = {
    "name": "name", "driver": "driver_version", "memory_mib": "memory.total", "sm_mhz": "clocks.sm",
    "sm_max_mhz": "clocks.max.sm", "memory_mhz": "clocks.mem", "power_w": "power.draw", "celsius": "temperature.gpu",
    "pcie_gen": "pcie.link.gen.max", "pcie_width": "pcie.link.width.max",
}  # fmt: skip
"""Our key -> nvidia-smi's."""

LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 8e9 / 8 * 128 / 130, 4: 16e9 / 8 * 128 / 130, 5: 32e9 / 8 * 128 / 130,
                    6: 64e9 / 8 * 242 / 256}  # fmt: skip
"""PCIe generation -> a lane's bytes per second in one direction, after its line code (PCI-SIG base specifications)."""


@cache
def card() -> dict[str, str]:
    """Returns FIELDS of torch's first GPU, as nvidia-smi writes them; empty if it is missing, or hangs."""
    return parse(ask(name_of(0), ",".join(FIELDS.values())) or "")


def parse(text: str) -> dict[str, str]:
    """Parses the first line of nvidia-smi's CSV; unknown values ("[N/A]") are left out."""
    lines = list(csv.reader(text.splitlines(), skipinitialspace=True))
    if not lines or len(lines[0]) != len(FIELDS):
        return {}
    return {key: value for key, value in zip(FIELDS, lines[0], strict=True) if not value.startswith("[")}


def link_bytes_per_s(facts: dict[str, Any]) -> float | None:
    """Returns the capacity of the link to the host in one direction, by its generation and width; None if not known."""
    try:
        return LANE_BYTES_PER_S[int(facts["pcie_gen"])] * int(facts["pcie_width"])
    except (KeyError, ValueError):
        return None


@dataclass(frozen=True)
class ProbedGroup:
    """A process group to try, and its variant. `environment`: variables that NCCL reads at its start."""

    name: str
    backend: str
    ranks: int
    environment: tuple[tuple[str, str], ...] = ()
    check: Check = check_torch


GROUPS = {
    "cuda": (
        ProbedGroup("NCCL, 1 rank", "nccl", 1),
        ProbedGroup("NCCL, 2 ranks on one GPU", "nccl", 2, tuple(SHARED.items())),
        ProbedGroup("gloo with CUDA tensors, 2 ranks", "gloo", 2),
        ProbedGroup("our collectives over NCCL, 1 rank", "nccl", 1, check=check_ours),
    ),
    "cpu": (
        ProbedGroup("gloo, 1 rank", "gloo", 1),
        ProbedGroup("gloo, 2 ranks", "gloo", 2),
        ProbedGroup("our collectives over gloo, 2 ranks", "gloo", 2, check=check_ours),
    ),
}


@dataclass(frozen=True)
class ProbeJob:
    """The work of one rank."""

    group: ProbedGroup
    rank: int
    device: str
    rendezvous: str


def try_group(job: ProbeJob, tell: Callable[[Any], None]) -> dict[str, Any]:
    """Runs collectives over the group, checked by value. Returns facts on the device. Raises ValueError."""
    os.environ.update(dict(job.group.environment))
    if job.group.ranks > 1:  # on one GPU, the first of those that we may use
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    where = (job.rank, job.group.ranks, job.device, job.group.backend, job.rendezvous, 1, LIMIT_S)
    with rank_environment(*where) as device:
        job.group.check(job.rank, job.group.ranks, device)
        if device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(device)
        nccl = ".".join(map(str, nccl_version() or ())) or None
        return {
            "gpu": torch.cuda.get_device_name(device), "free_bytes": free, "total_bytes": total, "nccl": nccl,
        }  # fmt: skip


def _tasks(setup: SuiteSetup) -> list[SuiteTask]:
    return [SuiteTask(g.name, try_group, partial(_jobs, g, setup.device), LIMIT_S) for g in GROUPS[setup.device]]


def _jobs(group: ProbedGroup, device: str, rendezvous: str) -> list[ProbeJob]:
    return [ProbeJob(group, rank, device, rendezvous) for rank in range(group.ranks)]


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    header = ["process group", "works", "s"]
    rows = [[one.name, "yes", f"{one.seconds:.1f}"] if one.is_ok else padded([one.name], one.words, 3) for one in done]
    known = versions(("torch", "zerobench", "hydra-core", "transformers"))
    notes = [", ".join([f"Python {platform.python_version()}", *(f"{name} {of}" for name, of in known.items())])]
    facts: dict[str, Any] = next((one.result for one in done if one.result), {})
    if facts:
        memory = f"{show_bytes(facts['total_bytes'])}, {show_bytes(facts['free_bytes'])} of it free"
        notes.append(f"{facts['gpu']}, {memory}; CUDA {torch.version.cuda}, NCCL {facts['nccl'] or 'unknown'}")
    told = card() if setup.device == "cuda" else {}
    notes += ["nvidia-smi: " + ", ".join(f"{key} {value}" for key, value in told.items())] if told else []
    return SuiteTable(header, rows, notes)


PROBE = SuiteSection(
    name="probe",
    title="Environment",
    asks="Do NCCL with one rank and with two on one GPU, gloo with CUDA tensors, and our collectives over NCCL work?",
    seconds=17,
    tasks=_tasks,
    table=_table,
    answers=("ok", "crash", "timeout", "oom"),
)
