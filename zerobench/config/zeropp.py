"""ZeRO++ on zero3: codecs of what travels, and secondary shards."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..strategies import names_with, spec_of
from ..zero.comm.zeropp import Zeropp as ZeroppPolicy
from .axis import Axis, CellView


@dataclass
class Zeropp(Axis):
    """ZeRO++ (arXiv 2306.10209) on zero3: nothing of it."""

    name: str = "none"

    def theory_shape(self) -> tuple[int | None, int | None, bool]:
        """Returns elements per block of coded weights and gradients, None where exact; whether there are secondary
        shards.
        """
        return None, None, False

    @property
    def label(self) -> str:
        """The choice as on a command line: "zeropp=qwz"."""
        return "" if self.name == "none" else f"zeropp={self.name}"


@dataclass
class PartsOfZeropp(Zeropp):
    """Which of its three parts, and elements a quantization block has. A choice's own part cannot be taken from it;
    others can be added.
    """

    quantize_weights: bool = False
    secondary_shards: bool = False
    quantize_gradients: bool = False
    weight_block: int = 256
    gradient_block: int = 256

    def validate(self, cell: CellView) -> list[str]:
        """Returns a sentence where there is nothing that ZeRO++ could shorten."""
        words, name = f"zeropp={self.name}", cell.strategy.name
        if not spec_of(name).composes.zeropp:
            why = f"it is for {' or '.join(names_with('zeropp'))}, whose gathers and reductions it shortens"
            return [f"{words}: {why}; leave it out with strategy={name}"]
        if cell.shard_group is not None:
            return [f"{words}: its shards are over all ranks; leave shard_group={cell.shard_group} out"]
        return self._parts_missing() or self._one_node(cell)

    def engine_options(self, cell: CellView, folder: str | None = None) -> dict[str, Any]:
        """The engine's policy."""
        return {"zeropp": self.policy()}

    def policy(self) -> ZeroppPolicy:
        """Returns the engine's policy."""
        return ZeroppPolicy(
            quantize_weights=self.quantize_weights, secondary_shards=self.secondary_shards,
            quantize_gradients=self.quantize_gradients, weight_block=self.weight_block,
            gradient_block=self.gradient_block,
        )  # fmt: skip

    def theory_shape(self) -> tuple[int | None, int | None, bool]:
        """Returns elements per block of coded weights and gradients, None where exact; whether there are secondary
        shards.
        """
        weights = self.weight_block if self.quantize_weights else None
        return weights, self.gradient_block if self.quantize_gradients else None, self.secondary_shards

    def _parts_missing(self) -> list[str]:
        """A sentence for each part that a choice is named after, and that is switched off."""
        others = ", ".join(name for name in CHOICES if name not in (self.name, "all"))
        words = f"zeropp={self.name} means that part; use one of {others}, and add what else is wanted"
        named = [one.name for one in fields(self) if one.default is True]
        return [f"zeropp.{part}=false: {words}" for part in named if not getattr(self, part)]

    def _one_node(self, cell: CellView) -> list[str]:
        """A sentence where secondary shards, all there is of ZeRO++, are shared by as many ranks as the first ones."""
        ranks = cell.world_size or 1
        if self.quantize_weights or self.quantize_gradients or ranks == 1 or cell.node_size not in (None, ranks):
            return []
        words = f"all {ranks} ranks are one node, so that its gathers would be plain zero3's"
        return [f"zeropp={self.name}: {words}; let node_size be a divisor of world_size={ranks} below it"]


@dataclass
class Qwz(PartsOfZeropp):
    """Parameters are gathered in int8."""

    name: str = "qwz"
    quantize_weights: bool = True


@dataclass
class Hpz(PartsOfZeropp):
    """The backward gathers from secondary shards inside a node."""

    name: str = "hpz"
    secondary_shards: bool = True


@dataclass
class Qgz(PartsOfZeropp):
    """Gradients are exchanged in int4, first inside a node, then between nodes."""

    name: str = "qgz"
    quantize_gradients: bool = True


@dataclass
class AllOfZeropp(PartsOfZeropp):
    """The three together."""

    name: str = "all"
    quantize_weights: bool = True
    secondary_shards: bool = True
    quantize_gradients: bool = True


CHOICES: dict[str, type] = {"none": Zeropp, "qwz": Qwz, "hpz": Hpz, "qgz": Qgz, "all": AllOfZeropp}
