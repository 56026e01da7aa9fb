"""The share of a model that was actually sent quantized, according to the measured traffic, not the options.

Quantized values have dtype uint8; all other data in a unit's gathers and reductions is floating point. A unit whose
gather (or reduction) sent uint8 counts with all its trainable parameters; with secondary shards its other gathers are
exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..records import TrafficRow
from ..theory.layout import by_kind, by_unit
from ..theory.shapes import ParameterShape

BYTES = "uint8"


def coded_share(traffic: Sequence[TrafficRow], kind: str, units: dict[str, int]) -> float:
    """Returns the share of the parameters in `units` whose collectives of that kind sent uint8; 0 if there are none."""
    coded = {row.unit for row in traffic if row.kind == kind and row.dtype == BYTES and not row.control}
    return sum(numel for name, numel in units.items() if name in coded) / max(1, sum(units.values()))


def units_of(shapes: Sequence[ParameterShape], persistence_numel: int) -> dict[str, int]:
    """Returns the number of trainable parameters of each zero3 unit, by the name of its collectives."""
    small, groups = by_unit(shapes, persistence_numel)
    counts: dict[str, int] = {}
    for group, members in (("(kept)", small), *((name or "(root)", indices) for name, indices in groups.items())):
        for number, kind in enumerate(by_kind(shapes, members), 1):
            trained = sum(shapes[i].numel for i in kind if shapes[i].trainable)
            counts[group if number == 1 else f"{group} part {number}"] = trained
    return counts
