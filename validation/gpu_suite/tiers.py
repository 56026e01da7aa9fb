"""Section 6: where states, activations and gradients are. What leaves the device, what that costs, and fragmentation.

states        zero1 at N = 1, nothing, gradients, the optimizer or both in host memory: bytes a parameter kept on the
              device beside table 1 of ZeRO-Offload (arXiv 2101.06840): 16, 14, 4, 2; and the step's time, files too
activations   each policy's peak on the device and its step
allocator     without and with an arena, and with segments that grow: the segments are chosen as a process starts,
              so these are tasks of their own, not cells
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from zerobench.config.cell import CellConfig
from zerobench.config.schema_memory import CpuOffload
from zerobench.sizes import show_bytes
from zerobench.worker import RankJob, run_rank

from .suite import NONE, SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable, SuiteTask, padded

SAME = ("strategy=zero1", "world_size=1", "precision=bf16", "optimizer=adam", "data=synthetic", "draw_on=device")
SHAPE = ("model=gpt2_124m", "sequence=1024", "micro_batch=4", "measure.warmup=2", "measure.steps=8")
SMALL_SHAPE = ("model=gpt", "model.layers=2", "model.hidden=32", "model.heads=2", "sequence=32", "micro_batch=2",
               "measure.warmup=2", "measure.steps=2", "launch.threads=1")  # fmt: skip

PAPER = {"none": 16, "cpu_gradients": 14, "cpu_optimizer": 4, "cpu": 2}
"""Device bytes a parameter by the value of `offload`."""

TILE = {False: "precision.tile_bytes=4194304", True: "precision.tile_bytes=4096"}
"""Small beside the model, by `small`: a tile of gradients in fp32 is none of the paper's rows."""

OFFLOADS = {"accounted": ("none", "cpu_gradients", "cpu_optimizer", "cpu"), "timed": ("none", "cpu", "nvme")}
SMALL_OFFLOADS = {"accounted": ("none", "cpu"), "timed": ("nvme",)}
POLICIES, SMALL_POLICIES = ("checkpoint", "offload", "checkpoint_offload"), ("checkpoint_offload",)
"""Beside none, which is the timed cell that offloads nothing."""

LIMIT_S = 40.0
EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True)
class SegmentsJob:
    """A timed pass. `allocator`: what torch's allocator is told, or empty."""

    rank_job: RankJob
    allocator: str


ALLOCATORS = {
    "arena=false": ("false", ""),
    "arena=true": ("true", ""),
    f"arena=false {EXPANDABLE}": ("false", EXPANDABLE),
}
SMALL_ALLOCATORS = ("arena=true",)


def measure_segments(job: SegmentsJob, tell: Callable[[Any], None]) -> dict[str, Any]:
    """The allocator's columns, and whether segments did grow (None: there are none)."""
    if job.allocator:
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # read when CUDA starts here; the second: older
            os.environ[name] = job.allocator
    record = run_rank(job.rank_job, tell)
    seconds = [step.seconds for step in record.steps if step.seconds is not None and not step.warmup]
    found = {"step_s": median(seconds), "grows": None, **record.process_memory}
    if job.rank_job.config.device == "cuda":
        import torch

        found["grows"] = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
    return found


def _cells(setup: SuiteSetup) -> list[Any]:
    same = (*SAME, *(SMALL_SHAPE if setup.small else SHAPE), TILE[setup.small])
    found = []
    for passes, offloads in (SMALL_OFFLOADS if setup.small else OFFLOADS).items():
        found += setup.cells("tiers", *same, f"measure.passes={passes}", f"offload={','.join(offloads)}")
    policies = ",".join(SMALL_POLICIES if setup.small else POLICIES)
    return found + setup.cells("tiers", *same, "measure.passes=timed", f"activation={policies}")


def _tasks(setup: SuiteSetup) -> list[SuiteTask]:
    names = SMALL_ALLOCATORS if setup.small else tuple(ALLOCATORS)
    return [SuiteTask(name, measure_segments, partial(_jobs, setup, *ALLOCATORS[name]), LIMIT_S) for name in names]


def _jobs(setup: SuiteSetup, arena: str, allocator: str, rendezvous: str) -> list[SegmentsJob]:
    shape = SMALL_SHAPE if setup.small else SHAPE
    (cell,) = setup.cells("tiers", *SAME, *shape, "activation=checkpoint", f"arena={arena}")
    config = cell.changed(launch=replace(cell.config.launch, timeout_s=LIMIT_S)).config
    return [SegmentsJob(RankJob(config, "timed", 0, rendezvous, os.path.dirname(rendezvous)), allocator)]


HEADER = ["what", "kept", "paper", "step ms", "allocated", "host", "pinned", "idle", "free", "retries"]

KEPT = ("parameters", "gradients", "master", "optimizer")


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    rows, notes = (
        [],
        ["kept: bytes a parameter on the device, each category's most, without what is on its way; paper: its table"],
    )
    notes.append("idle: reserved - allocated; free: the largest free block")
    for one in done:
        if not one.is_ok:
            rows.append(padded([_name(one)], one.words, len(HEADER)))
        elif one.row is not None:
            rows.append(_line(one, one.row, one.cell.measure.passes))
        else:
            rows.append(_line(one, one.result, "timed"))
            if "expandable" in one.name and one.result["grows"] is False:
                notes.append(f"{one.name}: torch did not heed it: the segments are as usual")
    if setup.device == "cpu":
        notes.append("on a CPU there is one memory, told apart by labels, and no allocator to ask")
    return SuiteTable(HEADER, rows, notes)


def _name(one: SuiteLaunch) -> str:
    if one.config is None:
        return one.name
    offload, activation = one.config.offload, one.cell.activation
    if isinstance(offload, CpuOffload):
        away = ["optimizer"] * offload.optimizer + ["gradients"] * offload.gradients
        return f"offload=cpu: {' and '.join(away)}"
    words = [axis.label for axis in (offload, activation) if axis.label]
    recomputed = one.cell.model.checkpoints and not activation.label
    return " ".join([*words, *["activation=checkpoint"] * bool(recomputed)]) or "nothing leaves"


def _line(one: SuiteLaunch, found: dict[str, Any], passes: str) -> list[str]:
    kept, paper = NONE, NONE
    if passes == "accounted":
        kept = f"{sum(found[f'max_{name}_bytes'] or 0 for name in KEPT) / found['psi']:.2f}"
        paper = str(PAPER[_offload_of(one.cell)])
    step = NONE if found["step_s"] is None else f"{1000 * found['step_s']:.1f}"
    names = ("allocated_bytes", "host_peak_bytes", "pinned_bytes", "fragmentation_bytes", "largest_free_block_bytes")
    sizes = [NONE if found.get(name) is None else show_bytes(found[name]) for name in names]
    retries = found.get("alloc_retries")
    return [_name(one), kept, paper, step, *sizes, NONE if retries is None else str(retries)]


def _offload_of(config: CellConfig) -> str:
    offload = config.offload
    if not isinstance(offload, CpuOffload):
        return "none"
    parts = {(False, True): "cpu_gradients", (True, False): "cpu_optimizer", (True, True): "cpu"}
    return parts[offload.optimizer, offload.gradients]


TIERS = SuiteSection(
    name="tiers",
    title="Tiers, activations and the allocator",
    asks="What do states and activations that leave the device save and cost, and do arenas or growing segments help?",
    seconds=92,
    cells=_cells,
    tasks=_tasks,
    table=_table,
    answers=("ok", "oom"),
    limit_s=LIMIT_S,
)
