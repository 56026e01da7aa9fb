"""The world of a resolved cell: ranks, device, backend and threads."""

from __future__ import annotations

import os

from ..host import job
from ..host.environment import FAKE, SIMULATED, exported_threads, nccl_version, usable_cores
from ..sections import known
from ..sizes import show_count
from ..strategies import names_with, spec_of
from .cell import CellConfig
from .keys import KEYS
from .plugins import LauncherChoice, job_nodes
from .schema import Config

NCCL_SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"
"""If 1, NCCL 2.30 and newer allow several ranks on one GPU; the GPU suite's first section tests it."""

OF_ACCOUNTED = {"snapshot": "a snapshot belongs", "events": "events belong"}
"""Key of `measure` that needs the accounted pass -> words for its error message."""

RANKS_PER_CORE, ALWAYS_FEW = 4, 16
"""Limits on processes of one machine: more are too slow to measure, and a simulated world predicts their bytes."""


def resolve_ranks(draft: Config, problems: list[str], launcher: LauncherChoice | None) -> dict[str, int]:
    """Fills in world_size, device, backend and threads in place, and returns the values of a cell that are not config
    keys: `nodes` and `ranks_per_gpu`, unless each is 1. `launcher`: the plugin whose jobs run the cell on machines that
    are unknown here; None for this machine.
    """
    for key, choices in ((key, KEYS[key].words) for key in ("device", "backend")):
        if (word := getattr(draft, key)) not in choices:
            problems.append(f"{key}={word}: use one of {', '.join(choices)}")
            return {}

    # GPUs of this machine, or of a launcher's job: on unknown machines each rank has one, if GPUs are requested.
    gpus = 0
    if draft.device != "cpu" and launcher is None:
        gpus = _count_gpus()
    elif launcher is not None and (draft.device == "cuda" or (draft.device != "cpu" and launcher.wants_gpus())):
        per_node = int(launcher.asked.get("gpus_per_node") or 1)
        gpus = draft.world_size or int(launcher.asked.get("nodes") or 1) * per_node
    if draft.backend == SIMULATED:
        _resolve_simulated(draft, gpus, problems)
        return {}
    if draft.rank is not None:
        why = f"in a real world every rank runs; leave it out, or use backend={SIMULATED}"
        problems.append(f"rank={draft.rank}: {why}")
    if draft.tensors == FAKE:
        problems.append(f"tensors={FAKE}: ranks of a real world send values; use backend={SIMULATED}")

    # Ranks, and how they share machines and GPUs. ranks_per_gpu: 0 without GPUs.
    context = job.current_job()
    ranks = draft.world_size
    if ranks is None and context is not None:
        ranks = context.job.world_size
    elif ranks is None:
        ranks = gpus if gpus > 1 or (gpus and draft.device == "cuda") else 2
    nodes, ranks_per_machine, ranks_per_gpu = 1, ranks, -(-max(1, ranks) // gpus) if gpus else 0
    if context is not None:
        membership = context.membership
        if ranks > len(membership.members):
            problems.append(job.too_many(ranks, len(membership.members)))
        nodes, ranks_per_machine = max(1, membership.machines(ranks)), membership.most_per_host(ranks)
        ranks_per_gpu = membership.ranks_per_gpu(ranks) if draft.device != "cpu" else 0
    elif launcher is not None:
        nodes = job_nodes(launcher, ranks, draft.node_size)
        tasks, per_node = int(launcher.asked.get("tasks_per_node") or 1), ranks // nodes
        if ranks % nodes:
            problems.append(f"world_size={ranks}: must be a multiple of the job's nodes, {nodes}")
        if 1 < tasks < per_node:
            why = f"{show_count(ranks, 'rank')} on {show_count(nodes, 'node')} are {per_node} tasks per node"
            problems.append(f"hydra.launcher.tasks_per_node={tasks}: {why}; leave out hydra.launcher.nodes")

    # Device and backend.
    chosen_by_user = draft.backend != "auto" or context is not None
    if draft.device == "auto":
        draft.device = "cuda" if ranks_per_gpu == 1 and draft.backend != "gloo" else "cpu"
    if draft.backend == "auto":
        draft.backend = "nccl" if draft.device == "cuda" and ranks_per_gpu == 1 else "gloo"
    if draft.device == "cuda" and not ranks_per_gpu:
        subject = "a rank of the job sees" if context is not None else "this machine has"
        problems.append(f"device=cuda: {subject} no GPU that torch can use")
    elif draft.device == "cuda" and ranks_per_gpu > 1:
        _refuse_search(draft, "a world whose ranks share a GPU", problems)
        allowed = os.environ.get(NCCL_SHARES) == "1" and (nccl_version() or (0,)) >= (2, 30)
        if draft.backend == "nccl" and not allowed:
            why = f"NCCL wants a GPU a rank, and here {ranks_per_gpu} would share one"
            ways = f"with backend=gloo they can, and with NCCL 2.30 or newer where {NCCL_SHARES}=1 is set"
            problems.append(f"world_size={ranks}: {why}; {ways}")
    if (draft.device, draft.backend) == ("cpu", "nccl"):
        problems.append("backend=nccl: on device=cpu use gloo")
    if draft.device == "cpu" and not chosen_by_user and launcher is None:
        cores = usable_cores()
        if ranks > max(ALWAYS_FEW, RANKS_PER_CORE * cores):
            few = f"use backend={SIMULATED} for the bytes and volumes of one rank, in seconds, or backend=gloo to run"
            why = f"{ranks} processes would take turns on {show_count(cores, 'core')}"
            problems.append(f"world_size={ranks}: {why}; {few} them all")
    draft.world_size = ranks
    _resolve_threads(draft, ranks_per_machine, launcher)
    return {"nodes": nodes, "ranks_per_gpu": max(1, ranks_per_gpu) if draft.device == "cuda" else 1}


def has_times(cell: CellConfig) -> bool:
    """Whether times are meaningful: not in a simulated world, and not if ranks take turns on a GPU."""
    return cell.measure.passes != "accounted" and cell.backend != SIMULATED and cell.ranks_per_gpu == 1


def problems_of_measure(cell: CellConfig) -> list[str]:
    """Returns error messages for measurements that this world does not support."""
    measure, passes, problems = cell.measure, cell.measure.passes, []
    if measure.trace and passes == "accounted":
        problems.append("measure.trace=true: a trace needs measured times; measure.passes=accounted takes none")
    elif measure.trace and not has_times(cell):
        simulated = cell.backend == SIMULATED
        what = "a simulated world sends nothing" if simulated else "ranks that share a GPU take turns"
        problems.append(f"measure.trace=true: {what}, so there is no overlap to trace; leave it out")
    for key, what in OF_ACCOUNTED.items():
        if getattr(measure, key) and passes == "timed":
            problems.append(f"measure.{key}=true: {what} to the accounted pass; measure.passes=timed has none")
    why, name = "", cell.strategy.name
    if not spec_of(name).composes.saves:
        why = f"strategy={name} writes no checkpoint here; use {', '.join(names_with('saves'))}"
    elif cell.backend == SIMULATED:
        why = "in a simulated world only one rank has states to write; use a real one"
    elif cell.tensor_parallel > 1:
        why = "ranks that share a model would write to one folder; leave tensor_parallel out"
    elif measure.save_every > measure.steps:
        why = f"measure.save_every={measure.save_every} is above measure.steps={measure.steps}, so none would begin"
    problems += [f"measure.save={measure.save}: {why}"] if why and measure.save != "none" else []
    if cell.search.memory_limit is not None and passes != "both":
        problems.append(
            f"search.memory_limit: a search weighs bytes and times; measure.passes={passes} does not have both in"
            " every launch"
        )
    return problems


def _resolve_threads(draft: Config, ranks_per_machine: int, launcher: LauncherChoice | None = None) -> None:
    """Sets launch.threads, unless it is given, from a launcher's cpus_per_task, OMP_NUM_THREADS, or this machine's
    cores.
    """
    if draft.launch.threads is not None:
        return
    if launcher is not None and (cpus := launcher.asked.get("cpus_per_task")):
        world_size = known(draft.world_size)
        per_node = world_size // job_nodes(launcher, world_size, draft.node_size)
        per_task = per_node // (launcher.asked.get("tasks_per_node") or per_node)
        draft.launch.threads = max(1, int(cpus) // max(1, per_task))
        return
    cores = usable_cores() if launcher is None else 1
    draft.launch.threads = exported_threads() or max(1, cores // max(1, ranks_per_machine))


def _resolve_simulated(draft: Config, gpus: int, problems: list[str]) -> None:
    if draft.device == "cuda" and not gpus:
        problems.append("device=cuda: this machine has no GPU; a simulated world needs one, or device=cpu")
    draft.device = "cuda" if gpus else "cpu"
    if draft.world_size is None:
        problems.append(f"backend={SIMULATED}: give world_size, the number of ranks that are simulated")
        draft.world_size = 2
    if not 0 <= (draft.rank or 0) < draft.world_size:
        problems.append(f"rank={draft.rank}: must be from 0 to {draft.world_size - 1}, below world_size")
    if draft.tensors == FAKE:
        draft.device = "cpu"  # stands for any: no kernel runs
    if not spec_of(draft.strategy.name).composes.simulated and draft.tensors != FAKE:
        why = f"a simulated world supports {', '.join(names_with('simulated'))}; peers need a real one"
        problems.append(f"strategy={draft.strategy.name}: {why}")
    if draft.measure.passes == "timed":
        problems.append(f"measure.passes=timed: backend={SIMULATED} has no times; use accounted")
    draft.measure.passes = "both"  # there is one, whether it was asked for or not
    _refuse_search(draft, f"backend={SIMULATED}", problems)
    _resolve_threads(draft, 1)


def _refuse_search(draft: Config, what: str, problems: list[str]) -> None:
    if draft.search.memory_limit is not None:
        problems.append(f"search.memory_limit: it looks for the fastest, and {what} has no times")


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
