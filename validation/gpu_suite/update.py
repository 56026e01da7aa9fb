"""Sections 1 and 2: an update's operations, each alone and in sequence, beside their price (zerobench predict with one
GPU), and the update of a 1.5B model by one kernel, in tiles, and by FSDP2, by turns, with clipping and without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerobench.commands.predict import costs_of
from zerobench.simulation.costs import BLOCK
from zerobench.zero.optim.one_pass import KERNELS, new_state
from zerobench.zero.precision import UpdatedShare

from .cells import ON_ONE_RANK, SMALL_GPT, speed_table
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
    """Returns elements, operation, and seconds. Operations go round several sets of tensors, so that none is left in
    the cache from one repetition to the next.
    """
    device, measured = torch.device(job[0]), []
    for numel in job[1]:
        sets = [_operations(numel, device) for _ in range(SETS // numel + 2 if device.type == "cuda" else 1)]
        measured += [(numel, name, _seconds([calls[name] for calls in sets], device)) for name in sets[0]]
    return measured


def _operations(numel: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Returns operation -> its call on a set of tensors."""
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


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    costs = costs_of("h100-3200", None).alone()

    def price(name: str, numel: int) -> float:
        if name in OWN:
            return costs.kernels_s(OWN[name][0] * numel, OWN[name][1])
        launches = -(-numel // (BLOCK * costs.most_blocks))
        return sum(costs.kernels_s(LISTS[one] * numel, launches, numel) for one in ([name] if name in LISTS else LISTS))

    def show(task: SuiteLaunch) -> list[list[str]]:
        return [
            [name, f"{numel / MI:g} Mi", f"{1e6 * seconds:.1f}", f"{1e6 * price(name, numel):.1f}",
             f"{BYTES[name] * numel / seconds / 1e12:.2f}"]
            for numel, name, seconds in task.result
        ]  # fmt: skip

    notes = [f"µs of one operation; priced: on an H100, with at most {costs.most_blocks} blocks in a launch"]
    return SuiteTable(["operation", "elements", "µs", "priced", "TB/s"], rows_of(done, show), notes)


OPERATIONS = SuiteSection(
    name="operations",
    title="Operations of an update",
    asks="Does an operation on few elements take the time that it is priced with?",
    about_s=28,
    tasks=lambda setup: [
        SuiteTask("operations of an update", measure, (setup.device, SMALL_SIZES if setup.small else SIZES), 60.0)
    ],
    table=_table,
)

UPDATED = f"{ON_ONE_RANK} measure.passes=timed measure.warmup=2"
WAYS = [
    f"{words} {clip}"
    for clip in ("measure.repeats=2", "clip=1.0")
    for words in ("strategy=zero1,fsdp2", "strategy=zero1 precision.tile_bytes=268435456")
]

UPDATE = SuiteSection(
    name="update",
    title="Update of a 1.5B model",
    asks="How long does an update take by one kernel, in tiles of 256 MiB and by FSDP2, with clipping and without?",
    about_s=47,
    sweeps=tuple(f"{UPDATED} model=gpt2_1_5b sequence=1024 micro_batch=8 measure.steps=10 {way}" for way in WAYS),
    small=tuple(f"{UPDATED} {SMALL_GPT} measure.steps=3 {way}" for way in WAYS),
    table=speed_table,
)
