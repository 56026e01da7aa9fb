"""Who is next: the order in which units are used, recorded in one forward and looked ahead in by the next.

A *use* is a unit's module being run; its number is its place in the list. Backward passes the uses in
reverse. Every rank must run its units in the same order; then all ranks gather and reduce in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from ..units.module_unit import ModuleUnit
    from ..units.unit import Unit

U = TypeVar("U")


class UnitOrder(Generic[U]):
    """Uses by forwards that are *open*, and those of the last complete forward to look ahead in.

    A forward is open until a backward that has come to it is over, or the parameters change: several may be open at
    once, for one backward through a sum or for one backward each. `forward` is the present one's number.
    """

    def __init__(self) -> None:
        self.forward = 0
        self._uses: list[U | None] = []  # None: of a forward that is not open any more
        self._forwards: list[int] = []  # whose they are
        self._open: set[int] = set()
        self._come_to: set[int] = set()  # by the present backward
        self._previous: list[U] = []
        self._not_returning: set[int] = set()  # uses that backward will not come to
        self._start = 0  # where the present forward starts in the uses

    @property
    def uses(self) -> list[U]:
        """Those of open forwards, in order."""
        return [unit for unit in self._uses if unit is not None]

    @property
    def end(self) -> int:
        """The number that the next use will have."""
        return len(self._uses)

    def begin_forward(self) -> None:
        """A forward starts; several may come before one backward."""
        self.forward += 1
        self._open.add(self.forward)
        self._start = len(self._uses)

    def record(self, unit: U) -> int:
        """Notes a use of `unit` and returns its number."""
        self._uses.append(unit)
        self._forwards.append(self.forward)
        return len(self._uses) - 1

    def forward_of(self, use: int) -> int:
        """The number of the forward that a use is in."""
        return self._forwards[use]

    def come_to(self, forward: int) -> bool:
        """Backward has come to a forward; returns whether that is open."""
        self._come_to.add(forward)
        return forward in self._open

    def end_backward(self, closes_all: bool) -> None:
        """The backward is over: the forwards that it has come to, or all, are closed; the last is to learn from."""
        latest = [unit for unit in self._uses[self._start :] if unit is not None]
        self._previous = latest or self._previous
        self._open -= self._open if closes_all else self._come_to
        self._come_to.clear()
        if not self._open:
            self._uses, self._forwards, self._start = [], [], 0
            self._not_returning.clear()
        self._uses = [u if f in self._open else None for u, f in zip(self._uses, self._forwards, strict=True)]

    def end_before(self, use: int, count: int) -> None:
        """Nothing up to here is trained: backward will not come to the last `count` uses up to this one."""
        self._not_returning.update(range(use - count + 1, use + 1))

    def ahead(self, use: int, depth: int) -> list[U]:
        """Up to `depth` units that came after this use in the last forward, if that went the same way so far."""
        place = use - self._start
        if self._previous[place : place + 1] != self._uses[use : use + 1]:
            return []
        return self._previous[place + 1 : place + 1 + depth]

    def behind(self, use: int, depth: int) -> list[U]:
        """Up to `depth` units that backward will come to after this use, nearest first."""
        window = range(max(0, use - depth), use)
        back = (self._uses[number] for number in reversed(window) if number not in self._not_returning)
        return [unit for unit in back if unit is not None]

    def passed(self, use: int) -> list[U]:
        """Units whose uses all lie after this one, last first: backward is done with them when it gets here."""
        still_to_come = {None, *self._uses[: use + 1]}
        later = dict.fromkeys(reversed(self._uses[use + 1 :]))
        return [unit for unit in later if unit is not None and unit not in still_to_come]

    def only_use(self, unit: U) -> int | None:
        """The number of the unit's use if it has just one."""
        places = [number for number, used in enumerate(self._uses) if used is unit]
        return places[0] if len(places) == 1 else None


class GathersAhead:
    """In backward: the gathers for the units that come next, which wait for room.

    While backward is at a unit, its gradients fill a buffer of its size and those of the unit before are on their way
    in another. Next to both a gathered unit would be the most that stage 3 ever holds: it is gathered when half of
    this one's gradients have come, and the others have arrived. `make_room` waits for these.
    """

    def __init__(self, make_room: Callable[[], None]) -> None:
        self._make_room = make_room
        self._entered: Sequence[ModuleUnit] = ()
        self._waiting: list[ModuleUnit] = []

    def enter(self, units: Sequence[ModuleUnit], following: list[ModuleUnit], must_wait: bool) -> None:
        """Backward is at `units`, `following` come next; without a need to wait they are gathered now."""
        self._entered, self._waiting = units, following
        if not (must_wait and any(unit.trainable for unit in units)):
            self.launch()

    def written(self, unit: Unit) -> None:
        """A gradient of `unit` has come."""
        if self._waiting and unit in self._entered and unit.gradients.is_half_full:
            self._make_room()
            self.launch()

    def launch(self) -> None:
        """Gathers what waits: at the latest when backward has come to it, in the same order on all ranks."""
        waiting, self._waiting = self._waiting, []
        for unit in waiting:
            unit.launch_unshard()

    def forget(self) -> None:
        """The backward is over."""
        self._entered, self._waiting = (), []
