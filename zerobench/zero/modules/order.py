"""The execution order of units, recorded in one forward and used for prefetch in the next.

A *use* is one run of a unit's module; its number is its index in the list. Backward traverses the uses in reverse.
Every rank must run its units in the same order, so that all ranks launch gathers and reductions in the same order.
"""

from __future__ import annotations

from typing import Generic, TypeVar

U = TypeVar("U")


class UnitOrder(Generic[U]):
    """Uses in the *open* forwards, and in the last complete forward, which predicts the next one for prefetch.

    A forward is open until a backward that has reached it ends, or the parameters change: several may be open at the
    same time, for one backward through a sum or for one backward each. `forward` is the number of the current one.
    """

    def __init__(self) -> None:
        self.forward = 0
        self._uses: list[U | None] = []  # None: of a forward that is closed
        self._forwards: list[int] = []  # forward number of each use
        self._open: set[int] = set()
        self._come_to: set[int] = set()  # reached by the current backward
        self._previous: list[U] = []
        self._not_returning: set[int] = set()  # uses that backward will not reach
        self._start = 0  # index of the current forward's first use

    @property
    def uses(self) -> list[U]:
        """Uses of open forwards, in order."""
        return [unit for unit in self._uses if unit is not None]

    @property
    def end(self) -> int:
        """The number of the next use."""
        return len(self._uses)

    def begin_forward(self) -> None:
        """Starts a forward; several may precede one backward."""
        self.forward += 1
        self._open.add(self.forward)
        self._start = len(self._uses)

    def record(self, unit: U) -> int:
        """Records a use of `unit` and returns its number."""
        self._uses.append(unit)
        self._forwards.append(self.forward)
        return len(self._uses) - 1

    def forward_of(self, use: int) -> int:
        """Returns the number of a use's forward."""
        return self._forwards[use]

    def come_to(self, forward: int) -> bool:
        """Records that backward has reached a forward; returns True if it is open."""
        self._come_to.add(forward)
        return forward in self._open

    @property
    def is_reached(self) -> bool:
        """True if the current backward has reached a forward."""
        return bool(self._come_to)

    def end_backward(self, closes_all: bool) -> None:
        """Ends the backward: closes the forwards that it reached, or all; the last one predicts the next."""
        latest = [unit for unit in self._uses[self._start :] if unit is not None]
        self._previous = latest or self._previous
        self._open -= self._open if closes_all else self._come_to
        self._come_to.clear()
        if not self._open:
            self._uses, self._forwards, self._start = [], [], 0
            self._not_returning.clear()
        self._uses = [u if f in self._open else None for u, f in zip(self._uses, self._forwards, strict=True)]

    def restart(self) -> None:
        """Closes all forwards, and predicts none: there are other units now."""
        self.end_backward(closes_all=True)
        self._previous = []

    def end_before(self, use: int, count: int) -> None:
        """Records that no unit up to this use is trained: backward will not reach the last `count` uses up to it."""
        self._not_returning.update(range(use - count + 1, use + 1))

    def ahead(self, use: int, depth: int) -> list[U]:
        """Returns up to `depth` units that followed this use in the last forward, if both forwards agree so far."""
        place = use - self._start
        if self._previous[place : place + 1] != self._uses[use : use + 1]:
            return []
        return self._previous[place + 1 : place + 1 + depth]

    def behind(self, use: int, depth: int) -> list[U]:
        """Returns up to `depth` units that backward reaches after this use, nearest first."""
        window = range(max(0, use - depth), use)
        back = (self._uses[number] for number in reversed(window) if number not in self._not_returning)
        return [unit for unit in back if unit is not None]

    def passed(self, use: int) -> list[U]:
        """Returns units whose uses all come after this one, last first: backward has finished with them."""
        still_to_come = {None, *self._uses[: use + 1]}
        later = dict.fromkeys(reversed(self._uses[use + 1 :]))
        return [unit for unit in later if unit is not None and unit not in still_to_come]

    def only_use(self, unit: U) -> int | None:
        """Returns the number of the unit's use if it has exactly one, otherwise None."""
        places = [number for number, used in enumerate(self._uses) if used is unit]
        return places[0] if len(places) == 1 else None
