"""What share of a model really traveled in codes: by the bytes that the traffic meter saw, not by what was asked for.

Codes are bytes, and everything else that a unit's gathers and reductions send is floating point. A unit whose gather
(or reduction) was seen to send bytes counts with all of its trainable parameters; with secondary shards its other
gathers bring them whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..records import TrafficRow
from ..theory.layout import by_kind, by_unit
from ..theory.shapes import ParameterShape

BYTES = "uint8"


def coded_share(traffic: Sequence[TrafficRow], kind: str, units: dict[str, int]) -> float:
    """Of the parameters in `units` the share whose collectives of that kind sent bytes; 0 of none."""
    coded = {row.unit for row in traffic if row.kind == kind and row.dtype == BYTES and not row.control}
    return sum(numel for name, numel in units.items() if name in coded) / max(1, sum(units.values()))


def units_of(shapes: Sequence[ParameterShape], persistence_numel: int) -> dict[str, int]:
    """Trainable parameters of each unit of zero3, by the name that its collectives bear."""
    small, groups = by_unit(shapes, persistence_numel)
    found: dict[str, int] = {}
    for group, members in (("(kept)", small), *((name or "(root)", mine) for name, mine in groups.items())):
        for number, kind in enumerate(by_kind(shapes, members), 1):
            trained = sum(shapes[i].numel for i in kind if shapes[i].trainable)
            found[group if number == 1 else f"{group} part {number}"] = trained
    return found
