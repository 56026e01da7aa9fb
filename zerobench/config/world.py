"""The world of a resolved cell: ranks, device, backend and threads."""

from __future__ import annotations

import os
from typing import Any

from ..cluster import job
from ..host.environment import SIMULATED, nccl_version
from ..sizes import show_count
from ..strategies import names_with, spec_of

NCCL_SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Set to 1 it lets NCCL, from 2.30 on, put several ranks on one GPU; `zerobench gpu-suite --only probe` tries it."""

RANKS_PER_CORE, ALWAYS_FEW = 4, 16
"""Limits of processes on one machine: more are too slow to measure, and a simulated world gives their bytes."""


def resolve_ranks(plain: dict[str, Any], problems: list[str]) -> None:
    """Fills in world_size, device, backend, threads and, where there are several, ranks_per_gpu and nodes."""
    for key, known in (("device", ("auto", "cpu", "cuda")), ("backend", ("auto", "gloo", "nccl", SIMULATED))):
        if plain[key] not in known:
            problems.append(f"{key}={plain[key]}: use one of {', '.join(known)}")
            return
    gpus = _count_gpus() if plain["device"] != "cpu" else 0
    if plain["backend"] == SIMULATED:
        _resolve_simulated(plain, gpus, problems)
        return
    if "rank" in plain:
        problems.append(
            f"rank={plain['rank']}: of a real world every rank is run; leave it out, or use backend={SIMULATED}"
        )
    ranks, mine = plain["world_size"], job.current_job()
    if ranks is None and mine is None:
        ranks = gpus if gpus > 1 or (gpus and plain["device"] == "cuda") else 2
    ranks = mine.job.world_size if ranks is None and mine is not None else ranks
    chosen = plain["backend"] != "auto" or mine is not None
    local, sharing = ranks, -(-max(1, ranks) // gpus) if gpus else 0  # ranks a GPU, 0 where there is none
    if mine is not None:
        local, sharing = _place_in_job(plain, mine.membership, ranks, problems)
    if plain["device"] == "auto":
        plain["device"] = "cuda" if sharing == 1 and plain["backend"] != "gloo" else "cpu"
    if plain["backend"] == "auto":
        plain["backend"] = "nccl" if plain["device"] == "cuda" and sharing == 1 else "gloo"
    if plain["device"] == "cuda" and not sharing:
        where = "this machine has" if mine is None else "a rank of the job sees"
        problems.append(f"device=cuda: {where} no GPU that torch can use")
    elif plain["device"] == "cuda" and sharing > 1:
        plain["ranks_per_gpu"] = sharing
        _refuse_search(plain, "a world whose ranks share a GPU", problems)
        if plain["backend"] == "nccl" and not _nccl_shares():
            ways = f"with backend=gloo they can, and with NCCL 2.30 or newer where {NCCL_SHARES}=1 is set"
            problems.append(f"world_size={ranks}: NCCL wants a GPU a rank, and here {sharing} would share one; {ways}")
    if (plain["device"], plain["backend"]) == ("cpu", "nccl"):
        problems.append("backend=nccl: on device=cpu use gloo")
    if plain["device"] == "cpu" and not chosen:
        problems += _too_crowded(ranks)
    plain["world_size"] = ranks
    _resolve_threads(plain, local)


def _too_crowded(ranks: int) -> list[str]:
    cores = os.cpu_count() or 1
    if ranks <= max(ALWAYS_FEW, RANKS_PER_CORE * cores):
        return []
    few = f"use backend={SIMULATED} for the bytes and volumes of one rank, in seconds, or backend=gloo to run them all"
    return [f"world_size={ranks}: {ranks} processes would take turns on {show_count(cores, 'core')}; {few}"]


def _nccl_shares() -> bool:
    return os.environ.get(NCCL_SHARES) == "1" and (nccl_version() or (0,)) >= (2, 30)


def _place_in_job(
    plain: dict[str, Any], membership: job.Membership, ranks: int, problems: list[str]
) -> tuple[int, int]:
    """The first ranks of the job that was joined: the most of them on one machine, and on one GPU.
    `nodes` is among the keys where they are on several machines, for that is another measurement.
    """
    if ranks > len(membership.members):
        problems.append(job.too_many(ranks, len(membership.members)))
    if membership.machines(ranks) > 1:
        plain["nodes"] = membership.machines(ranks)
    return membership.most_per_host(ranks), membership.ranks_per_gpu(ranks) if plain["device"] != "cpu" else 0


def has_times(config: dict[str, Any]) -> bool:
    """Returns True where a step's time is valid: not in a simulated world, nor where ranks take turns on a GPU; and
    whether it is taken.
    """
    taken = config["measure"].get("passes") != "accounted"
    return taken and config["backend"] != SIMULATED and "ranks_per_gpu" not in config


def check_measure(plain: dict[str, Any], problems: list[str]) -> None:
    """Adds sentences on requested measurements that this world does not permit."""
    measure, passes = plain["measure"], plain["measure"].get("passes")
    if measure.get("trace") and passes == "accounted":
        problems.append("measure.trace=true: a trace stands beside times; measure.passes=accounted takes none")
    elif measure.get("trace") and not has_times(plain):
        simulated = plain["backend"] == SIMULATED
        what = "of a simulated world nothing is sent" if simulated else "ranks that share a GPU take turns"
        problems.append(f"measure.trace=true: {what}, so there is no overlap to trace; leave it out")
    if measure.get("snapshot") and passes == "timed":
        problems.append("measure.snapshot=true: a history belongs to the accounted pass; measure.passes=timed has none")
    if plain["search"]["memory_limit"] is not None and passes is not None:
        problems.append(f"search.memory_limit: a search weighs bytes and times; measure.passes={passes} has not both")
    if measure.get("snapshot") and plain["device"] != "cuda":
        words = "it is CUDA's allocator that keeps a history, and there is none on a CPU; leave it out"
        problems.append(f"measure.snapshot=true on device={plain['device']}: {words}")


def _resolve_threads(plain: dict[str, Any], ranks: int) -> None:
    if plain["threads"] is None:
        plain["threads"] = max(1, (os.cpu_count() or 1) // max(1, ranks))


def _resolve_simulated(plain: dict[str, Any], gpus: int, problems: list[str]) -> None:
    """Of a simulated world one rank alone is run, on one device."""
    if plain["device"] == "cuda" and not gpus:
        problems.append("device=cuda: this machine has no GPU; a simulated world needs one, or device=cpu")
    plain["device"] = "cuda" if gpus else "cpu"
    if plain["world_size"] is None:
        problems.append(f"backend={SIMULATED}: give world_size, the number of ranks that are simulated")
        plain["world_size"] = 2
    if not 0 <= plain.get("rank", 0) < plain["world_size"]:
        problems.append(f"rank={plain['rank']}: must be from 0 to {plain['world_size'] - 1}, below world_size")
    if not spec_of(plain["strategy"]["name"]).composes.simulated:
        words = f"a simulated world is there for {', '.join(names_with('simulated'))}; peers need a real one"
        problems.append(f"strategy={plain['strategy']['name']}: {words}")
    if plain["measure"].get("passes") == "timed":
        problems.append(f"measure.passes=timed: backend={SIMULATED} has no times; use accounted")
    plain["measure"].pop("passes", None)  # there is one, whether it was asked for or not
    _refuse_search(plain, f"backend={SIMULATED}", problems)
    _resolve_threads(plain, 1)


def _refuse_search(plain: dict[str, Any], what: str, problems: list[str]) -> None:
    if plain["search"]["memory_limit"] is not None:
        problems.append(f"search.memory_limit: it looks for the fastest, and {what} has no times")


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
