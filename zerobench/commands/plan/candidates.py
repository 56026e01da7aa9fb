"""The table of candidates: a strategy, a tier for its states, an activation policy, each composed to a cell.

A user's own `strategy=`, `offload=` and `activation=` select from the table; every other key applies to all cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ...config.cell import Cell
from ...config.compose import RefusedError, compose_cells
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
    """A row of the table. `more`: keys of a variant."""

    strategy: str
    offload: str = "none"
    activation: str = "none"
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The choices as on a command line, without defaults: "zero3 offload=cpu activation=checkpoint"."""
        parts = [self.strategy, f"offload={self.offload}", f"activation={self.activation}", *self.more]
        return " ".join(part for part in parts if part not in ("offload=none", "activation=none"))

    @property
    def offloads(self) -> bool:
        """True if states leave the device."""
        return self.offload != "none"

    @property
    def recomputes(self) -> bool:
        """True if blocks are recomputed."""
        return self.activation.startswith("checkpoint")

    @property
    def rank(self) -> int:
        """Index in the order of the states that strategies partition; a user's own strategy comes last."""
        return STRATEGIES.index(self.strategy) if self.strategy in STRATEGIES else len(STRATEGIES)


def candidates(
    chosen: dict[str, tuple[str, ...]], strategies: Sequence[str] = STRATEGIES, tiers: Sequence[str] = tuple(TIERS)
) -> list[Candidate]:
    """Returns the rows. `chosen`: key of AXES -> the values that the user gave; for a missing key, the table's values
    that are in `strategies` and `tiers`.

    A strategy or tier that the user names is tried even if the table does not have it.
    """
    named, registered = chosen.get("strategy"), built_in()

    def composes(strategy: str, tier: str) -> bool:
        return tier == "none" or strategy not in registered or bool(registered[strategy].composes.offload)

    return [
        Candidate(strategy, tier, activation)
        for tier in chosen.get("offload", tiers)
        for strategy in named or [name for name in TIERS.get(tier, STRATEGIES) if name in strategies]
        for activation in chosen.get("activation", ACTIVATIONS)
        if composes(strategy, tier) or "offload" in chosen
    ]


def split_axes(overrides: Sequence[str], gpus: int) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Splits a user's overrides into those for all cells, and key of AXES -> values. Raises RefusedError."""
    chosen: dict[str, tuple[str, ...]] = {}
    keys, problems = dict[str, str](), []
    for word in overrides:
        key, _, value = word.partition("=")
        if key in AXES:
            chosen[key] = tuple(filter(None, value.split(",")))
        elif key == "world_size":
            problems.append(f"{word}: give the number of GPUs as --gpus {value}")
        elif key in ("backend", "tensors", "device", "search.memory_limit"):
            problems.append(f"{word}: a plan executes cells on fake tensors and needs no {key}; leave it out")
        else:
            keys[word] = key
    if problems:
        raise RefusedError(problems)
    given = {*keys.values(), *(["micro_batch"] if "batch" in keys.values() else [])}
    defaults = [f"{key}={value}" for key, value in DEFAULTS.items() if key not in given]
    return [*defaults, *keys, *SAME, f"world_size={gpus}"], chosen


def compose(rows: Sequence[Candidate], overrides: Sequence[str], device: str) -> dict[Candidate, Cell]:
    """Returns the cell of each row, as it runs on a device. Raises RefusedError if another key has several values."""
    cells: dict[Candidate, Cell] = {}
    for tier, group in groupby(rows, key=lambda row: row.offload):
        members = list(group)
        strategies = dict.fromkeys(row.strategy for row in members)
        activations = dict.fromkeys(row.activation for row in members)
        swept = [f"strategy={','.join(strategies)}", f"activation={','.join(activations)}", f"offload={tier}"]
        composed = compose_cells(["-m", *overrides, *swept], target=device)
        if len(composed) != len(members):
            several = [w for w in overrides if "," in w.partition("=")[2] and not w.partition("=")[2].startswith("[")]
            raise RefusedError([f"{'; '.join(several)}: a plan takes several values of {', '.join(AXES)} alone"])
        cells |= zip(members, composed, strict=True)  # Hydra's order: the last key changes fastest
    return cells
