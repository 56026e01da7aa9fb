"""Units of FSDP2, from its marks for torch's profiler: "FSDP::all_gather (blocks.0)"; the root has no name.

mark    begins and ends by an operator of the namespace `profiler`, which a dispatch mode sees, profiler or not
unit    the module that `fully_shard` was applied to

    FSDP::all_gather, FSDP::post_backward_reduce        collectives inside are the unit's
    FSDP::all_gather_copy_out                           the unit's full parameters are there at its end
    FSDP::post_forward, FSDP::post_backward_reshard     where memory of parameters was freed in it, they are given back
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..zero import labels
from .ledger_maxima import Event

NAMESPACE = "profiler"
ENTER, EXIT = "_record_function_enter_new", "_record_function_exit"
COLLECTIVES = ("all_gather", "post_backward_reduce")
GATHERS, RESHARDS = ("all_gather_copy_out",), ("post_forward", "post_backward_reshard")
ROOT = "(root)"
"""Unit of the parameters that are in no other, as the engine names its own."""

_MARK = re.compile(r"FSDP::(\w+)(?: \(([^)]*)\))?")


class Mark(NamedTuple):
    """A mark that has begun: its words, its unit, and the number of the ledger's events before it."""

    what: str
    unit: str
    place: int


class FsdpMarks:
    """Follows the marks. `tell(kind, unit, bytes)` hears of units that are gathered and freed."""

    def __init__(self, events: Callable[[int], Sequence[Event]], tell: Callable[[str, str, int], None]) -> None:
        self._events, self._tell = events, tell
        self._open: list[Mark] = []

    @property
    def unit(self) -> str:
        """The unit whose collective is being launched, or empty."""
        return next((mark.unit for mark in reversed(self._open) if mark.what in COLLECTIVES), "")

    def see(self, operator: str, args: Sequence[object], place: int) -> None:
        """Takes an operator of NAMESPACE, before event number `place`."""
        if operator == ENTER:
            said = _MARK.match(str(args[0]))
            self._open.append(Mark(said[1], said[2] or ROOT, place) if said else Mark("", "", place))
        elif self._open:
            self._end(self._open.pop())

    def _end(self, mark: Mark) -> None:
        if mark.what in GATHERS:
            size = sum(event.grown for event in self._events(mark.place) if event.grown > 0)
            self._tell(labels.GATHERED, mark.unit, size)
        elif mark.what in RESHARDS:
            sizes = ((event.stored, event.grown) for event in self._events(mark.place) if event.grown < 0)
            size = -sum(grown for stored, grown in sizes if stored and stored.category == labels.PARAMETERS)
            if size:
                self._tell(labels.FREED, mark.unit, size)
