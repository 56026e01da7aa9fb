"""The cells of table 1: what is executed, and with which options.

model     the paper gives sizes alone: conf/model says where each shape comes from
bucket    a thousandth of the gradients, so that each size is reduced in a thousand pieces: for 1T the 1e9 elements that
          Megatron-core's rule, max(40e6, 1e6·N), gives at N = 1,024
tile      fp32 gradients that are made at once for an update: 256 MiB, the engine's for a GPU, or a thousandth of those
          of the rank
variant   other options for the cell of which most is in flight: smaller units, none ahead of its use, smaller buckets
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from ...config.cell import CellConfig
from ...config.compose import compose_cells
from ...zero.options import TILE_BYTES
from .paper import BASELINE, RANKS, SIZES, STAGES

MODELS = {"7.5B": "zero_7_5b", "128B": "zero_128b", "1T": "zero_1t"}

PIECES = 1000

COMMON = (
    "backend=simulated", "tensors=fake", "device=cpu", "precision=bf16", "activation=checkpoint", "data=synthetic",
    "sequence=1024",
)  # fmt: skip
"""A micro-batch of one sequence; blocks recompute their activations."""

VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "zero3": {
        "tiles=2": ("model.tiles=2",),
        "tiles=4": ("model.tiles=4",),
        "tiles=4, prefetch=0": ("model.tiles=4", "strategy.prefetch=0"),
    },
    "zero2": {
        "buckets of 1 MiB": ("strategy.bucket_bytes=1MiB",),
        "buckets of 2 GB": ("strategy.bucket_bytes=2GB",),
    },
}
"""Strategy -> name of a variant of its cell at 7.5B and the most ranks -> what it changes."""


@dataclass(frozen=True)
class Place:
    """A cell's place in the table. `variant`: empty for the table's own cells."""

    size: str
    ranks: int
    strategy: str
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.size} {self.strategy} N={self.ranks}" + f" {self.variant}" * bool(self.variant)

    @property
    def arguments(self) -> list[str]:
        """The command line of the cell."""
        psi = SIZES[self.size]
        changed = VARIANTS[self.strategy][self.variant] if self.variant else ()
        words = [
            f"strategy={self.strategy}", f"world_size={self.ranks}", f"batch={self.ranks}",
            f"model={MODELS[self.size]}", *COMMON, f"precision.tile_bytes={self._tile_bytes}",
        ]  # fmt: skip
        if self.strategy != "zero3" and not any(one.startswith("strategy.bucket_bytes") for one in changed):
            words.append(f"strategy.bucket_bytes={int(2 * psi / PIECES)}")
        return words + list(changed)

    @property
    def config(self) -> CellConfig:
        """The cell, resolved. It is composed once for all N: the command line decides over nothing else by it."""
        base = _compose(replace(self, ranks=RANKS[0]))
        precision = replace(base.precision, tile_bytes=self._tile_bytes)
        return replace(base, world_size=self.ranks, batch=self.ranks, precision=precision)

    @property
    def _tile_bytes(self) -> int:
        shard = 1 if self.strategy == BASELINE else self.ranks
        return max(TILE_BYTES["cuda"], int(4 * SIZES[self.size] / shard / PIECES))


@cache
def _compose(place: Place) -> CellConfig:
    return compose_cells(place.arguments)[0].config


def places() -> list[Place]:
    """Returns the 54 cells, figure 1's baseline, DDP at the largest, and the variants; the quick ones first."""
    table = [Place(size, ranks, stage) for size in SIZES for ranks in reversed(RANKS) for stage in STAGES]
    baselines = [Place("7.5B", 64, BASELINE), Place("1T", RANKS[-1], BASELINE)]
    variants = [Place("7.5B", RANKS[-1], stage, name) for stage, named in VARIANTS.items() for name in named]
    return [*baselines[:1], *table, *baselines[1:], *variants]


def matching(every: Sequence[Place], words: Sequence[str]) -> list[Place]:
    """Returns those whose names contain every word. Raises ValueError where none does."""
    found = [place for place in every if all(word in str(place).split() for word in words)]
    if not found:
        sizes, ranks = ", ".join(SIZES), ", ".join(f"N={n}" for n in RANKS)
        raise ValueError(f"--only {' '.join(words)}: no such cell; use words of {sizes}, {ranks}, {', '.join(STAGES)}")
    return found
