"""History: what a ledger keeps of a run for a snapshot, where one is asked for; nothing of it is on the device.

interval    one step as it happened: what lived at its beginning, and its events in order
birth       one storage on a GPU, with the address at which it was made, and when
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .ledger_maxima import Event, StorageRecord

ENTRIES = 200_000
"""Events of an allocator's history, and births, that are kept, the last ones; of the history some KB each."""


@dataclass(frozen=True)
class Interval:
    """One step. `began`: its first instant, in seconds of the clock of events. `sizes`: bytes of what lived then.
    `categories`: the first of each storage of the interval.
    """

    began: float
    sizes: dict[StorageRecord, int]
    categories: dict[StorageRecord, str]
    events: list[Event]


class Listener(Protocol):
    """Listener to a ledger's intervals as they happen (event_log.py)."""

    def begin(self) -> None:
        """Takes note that an interval begins."""

    def changed(self) -> None:
        """Takes note that the next event changes a storage's size."""

    def marked(self, operator: str, args: Sequence[object]) -> None:
        """Takes an operator of torch's profiler."""

    def end(self, interval: Interval) -> None:
        """Takes an interval that is over."""


@dataclass(frozen=True)
class Birth:
    """A storage got memory at `address` on a GPU shortly before `at`, in seconds of the clock of events."""

    address: int
    at: float
    stored: StorageRecord


@dataclass
class History:
    """On a CPU the measured step with the highest peak, of equal ones the last; on CUDA the births."""

    step: Interval | None = None
    births: deque[Birth] = field(default_factory=lambda: deque(maxlen=ENTRIES))
