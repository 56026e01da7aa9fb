"""Sections 1 and 2: an update's operations, each alone and in sequence, beside their price (zerobench predict with one
GPU), and the update of a 1.5B model by one kernel, in tiles, and by FSDP2, by turns, with clipping and without.

Operations go round several sets of tensors, so that none is left in the cache from one repetition to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerobench.commands.predict import costs_of
from zerobench.config.cell import Cell
from zerobench.simulation.costs import BLOCK, GpuCosts
from zerobench.zero.optim.one_pass import KERNELS, new_state
from zerobench.zero.precision import UpdatedShare

from .cells import SMALL_GPT, speed_table
from .suite import SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable, SuiteTask, rows_of

MI = 2**20
SIZES, SMALL_SIZES = (int(2.5 * MI), 5 * MI, 16 * MI, 64 * MI), (MI // 64,)
LISTS = {"cast": 6, "fused AdamW": 28, "round": 6}
"""Multi-tensor operations of an update in tiles -> bytes per element, without a cache."""
OWN = {"one kernel": (28, 3), "norm": (2, 2)}
"""Our kernels -> bytes per element, and launches."""
SEQUENCE = ", ".join(LISTS)
BYTES = LISTS | {SEQUENCE: sum(LISTS.values())} | {name: size for name, (size, _) in OWN.items()}
SETS, REPEATS = 20 * MI, 20


def measure(job: tuple[str, Sequence[int]], tell: Callable[[Any], None]) -> list[tuple[int, str, float]]:
    """Returns elements, operation, and seconds."""
    device = torch.device(job[0])
    return [
        (numel, name, _seconds(one, device)) for numel in job[1] for name, one in _operations(numel, device).items()
    ]


def _operations(numel: int, device: torch.device) -> dict[str, list[Callable[[], object]]]:
    """Returns operation -> its call on each set of tensors."""
    found: dict[str, list[Callable[[], object]]] = {}
    for _ in range(SETS // numel + 2 if device.type == "cuda" else 1):
        for name, call in _of_set(numel, device).items():
            found.setdefault(name, []).append(call)
    return found


def _of_set(numel: int, device: torch.device) -> dict[str, Callable[[], object]]:
    master, wide = (torch.zeros(numel, device=device) for _ in range(2))
    gradient, parameter = (torch.zeros(numel, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.nn.Parameter(master)
    weight.grad, optimizer = wide, torch.optim.AdamW([weight], fused=True)
    in_tiles: list[Callable[[], object]] = [
        lambda: torch._foreach_copy_([wide], [gradient]), optimizer.step,
        lambda: torch._foreach_copy_([parameter], [master]),
    ]  # fmt: skip
    calls = dict(zip(LISTS, in_tiles, strict=True)) | {SEQUENCE: lambda: [call() for call in in_tiles]}
    if device.type in KERNELS and (kernels := KERNELS[device.type](device)) is not None:
        part = UpdatedShare(master, gradient, parameter, new_state(master, False), optimizer.param_groups[0], 0)
        own = (lambda: kernels.update([part], None, None, None)), (lambda: kernels.squares([gradient]))
        calls |= dict(zip(OWN, own, strict=True))
    return calls


def _seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    for call in calls:
        call()
    if device.type != "cuda":
        began = time.perf_counter()
        calls[0]()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10**8)  # the host issues all calls meanwhile, so that its time is not measured
    begin.record()
    for number in range(REPEATS):
        calls[number % len(calls)]()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / REPEATS


def _tasks(setup: SuiteSetup) -> list[SuiteTask]:
    sizes = SMALL_SIZES if setup.small else SIZES
    return [SuiteTask("operations of an update", measure, [(setup.device, sizes)], 60.0)]


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    costs = costs_of("h100-3200", None).alone()

    def show(task: SuiteLaunch) -> list[list[str]]:
        return [
            [name, f"{numel / MI:g} Mi", f"{1e6 * seconds:.1f}", f"{1e6 * _price(costs, name, numel):.1f}",
             f"{BYTES[name] * numel / seconds / 1e12:.2f}"]
            for numel, name, seconds in task.result
        ]  # fmt: skip

    notes = [f"µs of one operation; priced: on an H100, with at most {costs.most_blocks} blocks in a launch"]
    return SuiteTable(["operation", "elements", "µs", "priced", "TB/s"], rows_of(done, show), notes)


def _price(costs: GpuCosts, name: str, numel: int) -> float:
    if name in OWN:
        return costs.kernels_s(OWN[name][0] * numel, OWN[name][1])
    launches = -(-numel // (BLOCK * costs.most_blocks))
    return sum(costs.kernels_s(LISTS[one] * numel, launches, numel) for one in ([name] if name in LISTS else LISTS))


OPERATIONS = SuiteSection(
    name="operations",
    title="Operations of an update",
    asks="Does an operation on few elements take the time that it is priced with?",
    like=(("probe", "NCCL, 1 rank", 2.0),),
    tasks=_tasks,
    table=_table,
)

UPDATES = ("strategy=zero1,fsdp2",), ("strategy=zero1", "precision.tile_bytes=268435456")
SHAPE = ("model=gpt2_1_5b", "sequence=1024", "micro_batch=8", "measure.steps=10", "measure.warmup=2")
SMALL_SHAPE = (*SMALL_GPT, "measure.steps=3", "measure.warmup=2", "launch.threads=1")


def _cells(setup: SuiteSetup) -> list[Cell]:
    same = ("precision=bf16", "data=synthetic", "world_size=1", "measure.passes=timed", "draw_on=device")
    shape = SMALL_SHAPE if setup.small else SHAPE
    clips = (("measure.repeats=2",), ("clip=1.0",))
    return [cell for clip in clips for what in UPDATES for cell in setup.cells("update", *same, *shape, *what, *clip)]


UPDATE = SuiteSection(
    name="update",
    title="Update of a 1.5B model",
    asks="How long does an update take by one kernel, in tiles of 256 MiB and by FSDP2, with clipping and without?",
    like=(("speed", "(zero1|fsdp2) gpt2_1_5b", 4.5),),
    cells=_cells,
    table=speed_table,
)
