"""The table of candidates, each a cell, and the memory of one GPU that they must fit into.

candidate  a strategy, a tier for its states, an activation policy. A user's own `strategy=`, `offload=` and
           `activation=` select from the table; every other key applies to all cells
capacity   bytes of the device, and of host memory and disk, per GPU; None: unlimited
usable     the device minus a fraction for memory that no allocator of torch's counts: CUDA's context, libraries, NCCL
held       what must fit: the bytes that a GPU's caching allocator reserves, by default or with expandable segments,
           whichever is more; its peak of allocated bytes is less. On a CPU, which has no such allocator, the peak
load       the largest of the ratios held / usable: 1 is full
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

from ...config.cell import Cell
from ...config.compose import RefusedError, compose_cells
from ...fake_execution import Execution
from ...records import TensorRow
from ...sizes import show_bytes
from ...strategies import built_in

STRATEGIES = ("ddp", "zero1", "zero2", "megatron", "zero_redundancy", "fsdp2_no_reshard", "zero3", "fsdp2")
"""Strategies that are tried, in the order of the states that they partition."""

QUICKEST = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
"""Strategies that goal fastest tries, if the user names none: the others differ from these only in memory."""

TIERS = {"none": STRATEGIES, "cpu": ("zero1", "zero2", "zero3"), "nvme": ("zero3",)}
"""Tier of the states -> strategies that are tried with it."""

ACTIVATIONS = ("none", "checkpoint")
"""Policies that are tried: blocks keep the activations for backward, or recompute them."""

AXES = ("strategy", "offload", "activation")
"""Keys for which a plan takes several values, separated by commas."""

SAME = ("backend=simulated", "tensors=fake", "device=cpu", "draw_on=cpu")
"""A cell is simulated without values, on no device."""

DEFAULTS = {"precision": "bf16", "data": "synthetic", "micro_batch": "1", "sequence": "1024"}
"""Key -> its default here; the defaults of `zerobench` itself are for training on a CPU."""


@dataclass(frozen=True)
class Candidate:
    """A row of the table. `name`: its choices as on a command line, without defaults. `more`: keys of a variant."""

    strategy: str
    offload: str
    activation: str
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The row as text: "zero3 offload=cpu activation=checkpoint"."""
        parts = [self.strategy, f"offload={self.offload}" * self.offloads, f"activation={self.activation}", *self.more]
        return " ".join(part for part in parts if part and part != "activation=none")

    @property
    def offloads(self) -> bool:
        """True if states leave the device."""
        return self.offload != "none"

    @property
    def recomputes(self) -> bool:
        """True if blocks are recomputed."""
        return self.activation.startswith("checkpoint")


def candidates(chosen: dict[str, tuple[str, ...]]) -> list[Candidate]:
    """Returns the rows. `chosen`: key of AXES -> the values that the user gave; a missing key takes the table's values.

    A strategy or tier that the user names is tried even if the table does not have it.
    """
    named, tiers = chosen.get("strategy", ()), chosen.get("offload", tuple(TIERS))
    activations = chosen.get("activation", ACTIVATIONS)
    return [
        Candidate(strategy, tier, activation)
        for tier in tiers
        for strategy in (named or TIERS.get(tier, STRATEGIES))
        for activation in activations
        if _composes(strategy, tier) or "offload" in chosen
    ]


def _composes(strategy: str, tier: str) -> bool:
    known = built_in()
    return tier == "none" or strategy not in known or bool(known[strategy].composes.offload)


def words_of(overrides: list[str], gpus: int) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Splits a user's overrides into those for all cells, and key of AXES -> values. Raises RefusedError."""
    chosen: dict[str, tuple[str, ...]] = {}
    words, problems = [], []
    for word in overrides:
        key, _, value = word.partition("=")
        if key in AXES:
            chosen[key] = tuple(filter(None, value.split(",")))
        elif key == "world_size":
            problems.append(f"{word}: give the number of GPUs as --gpus {value}")
        elif key in ("backend", "tensors", "device", "search.memory_limit"):
            problems.append(f"{word}: a plan executes cells on fake tensors and needs no {key}; leave it out")
        else:
            words.append(word)
    given = {word.partition("=")[0] for word in words} | ({"micro_batch"} if _has(words, "batch") else set())
    defaults = [f"{key}={value}" for key, value in DEFAULTS.items() if key not in given]
    if problems:
        raise RefusedError(problems)
    return [*defaults, *words, *SAME, f"world_size={gpus}"], chosen


def _has(words: list[str], key: str) -> bool:
    return any(word.partition("=")[0] == key for word in words)


def compose(rows: list[Candidate], words: list[str]) -> dict[Candidate, Cell]:
    """Returns the cell of each row, as it would run. Raises RefusedError if another key has several values."""
    found: dict[Candidate, Cell] = {}
    for tier, group in groupby(rows, key=lambda row: row.offload):
        members = list(group)
        strategies = list(dict.fromkeys(row.strategy for row in members))
        activations = list(dict.fromkeys(row.activation for row in members))
        swept = [f"strategy={','.join(strategies)}", f"activation={','.join(activations)}", f"offload={tier}"]
        cells = compose_cells(["-m", *words, *swept])
        if len(cells) != len(members):
            several = [w for w in words if "," in w.partition("=")[2] and not w.partition("=")[2].startswith("[")]
            raise RefusedError([f"{'; '.join(several)}: a plan takes several values of {', '.join(AXES)} alone"])
        found |= zip(members, cells, strict=True)  # Hydra's order: the last key changes fastest
    return {row: found[row] for row in rows}


# -- capacity --------------------------------------------------------------------------------------


MEMORIES = ("device", "host", "nvme")

RESERVE = 0.08
"""Fraction of the device that is kept from the allocator by default; the GPU suite leaves as much."""


@dataclass(frozen=True)
class Capacity:
    """Bytes for one GPU. `reserve`: fraction of the device that is left free."""

    device_bytes: int
    reserve: float = RESERVE
    host_bytes: int | None = None
    disk_bytes: int | None = None

    @property
    def usable_bytes(self) -> int:
        """Bytes that the device's allocator may take."""
        return int(self.device_bytes * (1 - self.reserve))

    def limit_of(self, tier: str) -> float:
        """Returns the usable bytes of a tier, infinite if there is no limit."""
        limits = {"device": self.usable_bytes, "host": self.host_bytes, "nvme": self.disk_bytes}
        limit = limits[tier]
        return math.inf if limit is None else limit

    def load(self, used: Used) -> float:
        """Returns the load of the fullest tier; above 1 it does not fit."""
        return max(used.bytes_in(tier) / self.limit_of(tier) for tier in MEMORIES)

    def fits(self, used: Used) -> bool:
        """Returns True if every tier has room."""
        return self.load(used) <= 1

    def fullest(self, used: Used) -> str:
        """Returns the tier that is fullest."""
        return max(MEMORIES, key=lambda tier: used.bytes_in(tier) / self.limit_of(tier))

    def smallest_device(self, used: Used) -> int:
        """Returns the bytes of the smallest device on which the same would fit."""
        return math.ceil(used.held_bytes / (1 - self.reserve))


@dataclass(frozen=True)
class Used:
    """Bytes at the peak of one simulated rank, and bytes that it sends in a step.

    `peak_bytes`: as counted by the device's allocator, on a GPU in blocks of 512 bytes and with cuBLAS's workspaces.
    `at_peak`: category -> bytes of tensors at the peak instant. `largest`: the largest storage at that instant. `psi`:
    number of trainable parameters, `frozen`: of the others. `reserved_bytes`: most that a GPU's caching allocator
    reserves for the step, None for a CPU.
    """

    psi: int
    peak_bytes: int
    host_bytes: int
    file_bytes: int
    at_peak: dict[str, int]
    largest: TensorRow | None
    volume_psi: float
    wire_bytes: float
    reserved_bytes: int | None = None
    frozen: int = 0

    @property
    def numel(self) -> int:
        """Parameters of the model, trained or not."""
        return self.psi + self.frozen

    @property
    def held_bytes(self) -> int:
        """Bytes that must fit the device."""
        return self.reserved_bytes or self.peak_bytes

    @property
    def held_words(self) -> str:
        """These bytes as text: "9.66 GiB reserved"."""
        return f"{show_bytes(self.held_bytes)} {'reserved' if self.reserved_bytes else 'at its peak'}"

    def bytes_in(self, tier: str) -> int:
        """Returns the bytes that must fit a tier."""
        return {"device": self.held_bytes, "host": self.host_bytes, "nvme": self.file_bytes}[tier]

    @property
    def binding(self) -> str:
        """The category with the largest share of the peak."""
        return max(self.at_peak, key=lambda category: self.at_peak[category])


def used_of(execution: Execution, psi: int, frozen: int = 0) -> Used:
    """Returns the memory and traffic of an execution."""
    record = execution.record
    assert record is not None
    tensors = [row for row in execution.tensors if row.tier == "device"]
    allocated, reserved = execution.allocated_bytes, execution.reserved_bytes
    return Used(
        psi=psi, frozen=frozen, peak_bytes=allocated or execution.peak_bytes,
        host_bytes=execution.host_bytes, file_bytes=execution.file_bytes,
        at_peak=execution.at_peak, largest=max(tensors, key=lambda row: row.bytes, default=None),
        volume_psi=execution.volume_elements / psi if psi else 0.0, wire_bytes=execution.wire_bytes,
        reserved_bytes=max(reserved) if reserved else None,
    )  # fmt: skip


def name_of(tensor: TensorRow | None) -> str:
    """Returns a short name of a storage: its label or the line that made it, and its module."""
    if tensor is None:
        return "–"
    line = tensor.source.replace("zerobench/", "", 1)
    name = tensor.name or line or tensor.module or tensor.category
    return f"{name} in {tensor.module}" if tensor.module and tensor.module not in name else name
