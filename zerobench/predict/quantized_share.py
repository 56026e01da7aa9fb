"""The share of a model that was really sent quantized: by the bytes that the traffic meter saw, not by the options.

Quantized values are bytes; all other data of a unit's gathers and reductions is floating point. A unit whose gather (or
reduction) sent bytes counts with all of its trainable parameters; with secondary shards its other gathers are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..records import TrafficRow
from ..theory.layout import by_kind, by_unit
from ..theory.shapes import ParameterShape

BYTES = "uint8"


def coded_share(traffic: Sequence[TrafficRow], kind: str, units: dict[str, int]) -> float:
    """Returns the share of the parameters in `units` whose collectives of that kind sent bytes; 0
    without parameters.
    """
    coded = {row.unit for row in traffic if row.kind == kind and row.dtype == BYTES and not row.control}
    return sum(numel for name, numel in units.items() if name in coded) / max(1, sum(units.values()))


def units_of(shapes: Sequence[ParameterShape], persistence_numel: int) -> dict[str, int]:
    """Returns the trainable parameters of each unit of zero3, by the name of its collectives."""
    small, groups = by_unit(shapes, persistence_numel)
    found: dict[str, int] = {}
    for group, members in (("(kept)", small), *((name or "(root)", mine) for name, mine in groups.items())):
        for number, kind in enumerate(by_kind(shapes, members), 1):
            trained = sum(shapes[i].numel for i in kind if shapes[i].trainable)
            found[group if number == 1 else f"{group} part {number}"] = trained
    return found
