"""The table of candidates: a strategy, a tier for its states, an activation policy. Each row becomes a cell.

A user's own `strategy=`, `offload=` and `activation=` choose from the table; every other key goes to all cells alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from ...config.cell import Cell
from ...config.compose import RefusedError, compose_cells
from ...strategies import built_in

STRATEGIES = ("ddp", "zero1", "zero2", "megatron", "zero_redundancy", "fsdp2_no_reshard", "zero3", "fsdp2")
"""In the order of what they partition."""

TIERS = {"none": STRATEGIES, "cpu": ("zero1", "zero2", "zero3"), "nvme": ("zero3",)}
"""Tier of the states -> strategies that are tried with it."""

ACTIVATIONS = ("none", "checkpoint")
"""Policies that are tried: blocks keep what backward needs, or are computed again."""

AXES = ("strategy", "offload", "activation")
"""Keys of which a plan takes several values, with commas."""

SAME = ("backend=simulated", "tensors=fake", "device=cpu", "draw_on=cpu")
"""A cell is executed without values on no device at all."""

DEFAULTS = {"precision": "bf16", "data": "synthetic", "micro_batch": "1"}
"""Key -> its value where the user gives none; those of `zerobench` itself are for training on a CPU."""


@dataclass(frozen=True)
class Candidate:
    """A row of the table. `name`: its choices as on a command line, less defaults."""

    strategy: str
    offload: str
    activation: str

    @property
    def name(self) -> str:
        """The row in words: "zero3 offload=cpu activation=checkpoint"."""
        parts = [self.strategy, f"offload={self.offload}" * self.offloads, f"activation={self.activation}"]
        return " ".join(part for part in parts if part and part != "activation=none")

    @property
    def offloads(self) -> bool:
        """True where states leave the device."""
        return self.offload != "none"

    @property
    def recomputes(self) -> bool:
        """True where blocks are computed again."""
        return self.activation.startswith("checkpoint")


def candidates(chosen: dict[str, tuple[str, ...]]) -> list[Candidate]:
    """Returns the rows. `chosen`: key of AXES -> the values that the user gave; a key without is at the table's.

    A strategy or tier that the user names is tried though the table does not have it.
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
    """Splits a user's overrides: those for all cells, and key of AXES -> values. Raises RefusedError."""
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
    """Returns the cell of each row, as it would run. Raises RefusedError where a key of the user's has a sweep."""
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
