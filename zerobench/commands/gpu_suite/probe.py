"""Section 1: the process groups that work here. Each is tried in processes of its own: a hang or a crash is a result.

A rank sends tensors through torch's collectives, or through ours, and checks every value that it receives.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...config.world import NCCL_SHARES
from ...host.environment import nccl_version, rank_environment
from ...results.provenance import versions
from ...sizes import show_bytes
from .card import card
from .collectives import check_ours, check_torch
from .section import Done, Section, Setup, Table, Task, padded

LIMIT_S = 45.0
"""Time limit: the first process on a new machine reads CUDA's libraries from a cold disk."""

SHARED = {NCCL_SHARES: "1"}
"""Permits NCCL from 2.30 on to put two ranks on one GPU."""

Check = Callable[[int, int, torch.device], None]
"""Takes rank, ranks and device; raises where a collective returns a wrong value."""


@dataclass(frozen=True)
class Group:
    """A process group to try, and its variant. `environment`: variables that NCCL reads at its start."""

    name: str
    backend: str
    ranks: int
    environment: tuple[tuple[str, str], ...] = ()
    check: Check = check_torch


GROUPS = {
    "cuda": (
        Group("NCCL, 1 rank", "nccl", 1),
        Group("NCCL, 2 ranks on one GPU", "nccl", 2, tuple(SHARED.items())),
        Group("gloo with CUDA tensors, 2 ranks", "gloo", 2),
        Group("our collectives over NCCL, 1 rank", "nccl", 1, check=check_ours),
    ),
    "cpu": (
        Group("gloo, 1 rank", "gloo", 1),
        Group("gloo, 2 ranks", "gloo", 2),
        Group("our collectives over gloo, 2 ranks", "gloo", 2, check=check_ours),
    ),
}


@dataclass(frozen=True)
class ProbeJob:
    """The work of one rank."""

    group: Group
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
        return _facts(device)


def _facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "free_bytes": free,
        "total_bytes": total,
        "nccl": ".".join(map(str, nccl_version() or ())) or None,
    }


def _tasks(setup: Setup) -> list[Task]:
    return [Task(g.name, try_group, partial(_jobs, g, setup.device), LIMIT_S) for g in GROUPS[setup.device]]


def _jobs(group: Group, device: str, rendezvous: str) -> list[ProbeJob]:
    return [ProbeJob(group, rank, device, rendezvous) for rank in range(group.ranks)]


def _table(setup: Setup, done: list[Done]) -> Table:
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
    return Table(header, rows, notes)


PROBE = Section(
    name="probe",
    title="Environment",
    asks="Do NCCL with one rank and with two on one GPU, gloo with CUDA tensors, and our collectives over NCCL work?",
    seconds=30,
    tasks=_tasks,
    table=_table,
    answers=("ok", "crash", "timeout", "oom"),
)
