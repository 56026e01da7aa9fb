"""Section 5: the rate of the bus to the host. Copies by size: pinned and pageable, each way and both at once.

    up, down, both   pinned, host to device, device to host, and both at once on separate streams
    pageable up, pageable down
    copy             on a CPU: from memory to memory

A rate is the median of the repetitions; of `both` it is the sum of the directions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from zerobench.sizes import SIZES, show_bytes

from .probe import card, link_bytes_per_s
from .suite import NONE, SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable, SuiteTask, padded

MIB = SIZES["mib"]
LIMIT_S = 60.0
REPETITIONS = 5

BYTES = (MIB, 16 * MIB, 64 * MIB, 256 * MIB)
SMALL_BYTES = (MIB // 16, MIB)
RAW_BYTES, SMALL_RAW_BYTES = 1024 * MIB, 16 * MIB
"""Bytes of the copy that shows the raw rate."""

LEAST_BYTES = 64 * MIB
"""Bytes moved per reading of the clock."""


@dataclass(frozen=True)
class CopyBuffers:
    """Buffers of one size, uint8. `here`: on the device; `back`: there too, for the way down while
    `here` is written.
    """

    here: torch.Tensor
    back: torch.Tensor
    pinned: tuple[torch.Tensor, torch.Tensor]
    pageable: torch.Tensor
    streams: list[Any]

    @staticmethod
    def of(size: int, device: torch.device) -> CopyBuffers:
        """Allocates and touches them, so that no copy includes page faults."""
        cuda = device.type == "cuda"
        pinned = [torch.zeros(size, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
        here, back = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
        return CopyBuffers(here, back, (pinned[0], pinned[1]), torch.zeros(size, dtype=torch.uint8),
                       [torch.cuda.Stream() for _ in range(2 * cuda)])  # fmt: skip


def _both(b: CopyBuffers) -> None:
    with torch.cuda.stream(b.streams[0]):
        b.here.copy_(b.pinned[0], non_blocking=True)
    with torch.cuda.stream(b.streams[1]):
        b.pinned[1].copy_(b.back, non_blocking=True)


Copy = Callable[[CopyBuffers], Any]

COPIES: dict[str, dict[str, tuple[Copy, int]]] = {
    "cuda": {
        "up": (lambda b: b.here.copy_(b.pinned[0], non_blocking=True), 1),
        "down": (lambda b: b.pinned[1].copy_(b.here, non_blocking=True), 1),
        "both": (_both, 2),
        "pageable up": (lambda b: b.here.copy_(b.pageable), 1),
        "pageable down": (lambda b: b.pageable.copy_(b.here), 1),
    },
    "cpu": {"copy": (lambda b: b.here.copy_(b.pageable), 1)},
}
"""Device -> kind -> the copy, and the multiple of the size that it moves."""


def measure_copies(job: tuple[str, tuple[int, ...]], tell: Callable[[Any], None]) -> list[dict[str, Any]]:
    """Returns a row per kind and size: kind, bytes, bytes_per_s. `job`: the device, and the sizes."""
    rows = []
    device, sizes = job
    torch.set_num_threads(1)
    for size in sizes:
        buffers = CopyBuffers.of(size, torch.device(device))
        for kind, (copy, times) in COPIES[device].items():
            seconds = median(_seconds(copy, buffers) for _ in range(REPETITIONS + 1))
            rows.append({"kind": kind, "bytes": size, "bytes_per_s": times * size / seconds})
        tell(size)
    return rows


def _seconds(copy: Copy, buffers: CopyBuffers) -> float:
    """Returns the seconds of one copy. Small ones are timed in groups: the launch of one takes as long as the copy."""
    again = max(1, LEAST_BYTES // buffers.here.numel())
    finish = torch.cuda.synchronize if buffers.here.is_cuda else lambda: None
    finish()
    begun = time.perf_counter()
    for _ in range(again):
        copy(buffers)
    finish()
    return (time.perf_counter() - begun) / again


def _tasks(setup: SuiteSetup) -> list[SuiteTask]:
    sizes, raw = (SMALL_BYTES, SMALL_RAW_BYTES) if setup.small else (BYTES, RAW_BYTES)
    parts = {"copies by size": sizes, f"one copy of {show_bytes(raw)}": (raw,)}
    return [SuiteTask(name, measure_copies, partial(_jobs, setup.device, of), LIMIT_S) for name, of in parts.items()]


def _jobs(device: str, sizes: tuple[int, ...], rendezvous: str) -> list[Any]:
    return [(device, sizes)]


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    kinds = list(COPIES[setup.device])
    header = ["size", *(f"{kind} GB/s" for kind in kinds), "best of the raw rate"]
    found = [row for one in done for row in one.result or []]
    raw, words = _raw_rate(setup, found)
    rows = [padded([one.name], one.words, len(header)) for one in done if not one.is_ok]
    for size in dict.fromkeys(row["bytes"] for row in found):
        rates = {row["kind"]: row["bytes_per_s"] for row in found if row["bytes"] == size}
        best = max(rate for kind, rate in rates.items() if kind != "both")
        share = NONE if raw is None else f"{100 * best / raw:.0f} %"
        rows.append([show_bytes(size), *(f"{rates[kind] / 1e9:.3g}" for kind in kinds), share])
    return SuiteTable(header, rows, [words] if words else [])


def _raw_rate(setup: SuiteSetup, found: list[dict[str, Any]]) -> tuple[float | None, str]:
    """Returns bytes per second in one direction: the link's, or else the largest copy's; and the source
    of the figure.
    """
    facts = card() if setup.device == "cuda" else {}
    link = link_bytes_per_s(facts)
    if link is not None:
        words = (
            f"raw rate: PCIe {facts['pcie_gen']}.0 × {facts['pcie_width']}, {link / 1e9:.1f} GB/s each way in theory"
        )
        return link, words
    largest = max((row["bytes"] for row in found), default=0)
    rates = [row["bytes_per_s"] for row in found if row["bytes"] == largest and row["kind"] != "both"]
    return max(rates, default=None), f"raw rate: the copy of {show_bytes(largest)}" if rates else ""


BUS = SuiteSection(
    name="bus",
    title="Bus to the host",
    asks="How much of the raw rate do pinned copies reach, each way and both ways at once?",
    seconds=7,
    tasks=_tasks,
    table=_table,
)
