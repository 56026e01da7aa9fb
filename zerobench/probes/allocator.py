"""The allocator's peaks by phase, beside the ledger: taken and reset wherever a phase begins.

Its counters live on the host, CUDA's too, and change when a tensor is allocated or freed there, as the ledger does, so
a phase is the same interval for both, whatever the device is still executing. The allocators: allocator_total.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..records import ALLOCATOR, MemoryRow
from .ledger_maxima import ASIDE

IN_MEMORY = ("allocated", "outside_ledger")
"""Rows of ALLOCATOR that exist for an allocator without a cache: a CPU's."""


def nothing() -> dict[str, int]:
    """Returns the peaks where no allocator records any."""
    return {}


class PhasePeaks:
    """Peaks by phase. `take`: the peaks by name since the last call, "allocated" and on CUDA those of
    probes/cuda_memory.py;
    `categories`: the rows that exist. `begin` and `end` bound an interval, as they do for the ledger; `of` has the
    largest of each phase and of each whole interval, by name.
    """

    def __init__(self, take: Callable[[], Mapping[str, int]], categories: Sequence[str] = ALLOCATOR) -> None:
        self.of: dict[str, Counter[str]] = {}
        self._take, self._categories = take, categories
        self._phase = "init"
        self._stretch: dict[str, Counter[str]] = {}

    def enter_phase(self, phase: str) -> None:
        """Assigns the peaks until now to the previous phase, later ones to `phase`."""
        self._see(self._stretch, self._phase, Counter(self._take()))
        self._phase = phase

    def begin(self) -> None:
        """Begins an interval: drops the peaks since the last."""
        self._take()
        self._stretch = {}

    def end(self, whole: str) -> None:
        """Ends the interval: its phases are merged into `of`, and the largest of them as `whole`."""
        self.enter_phase(self._phase)
        self._stretch.pop(ASIDE, None)
        for phase, peaks in self._stretch.items():
            self._see(self.of, phase, peaks)
            self._see(self.of, whole, peaks)

    @staticmethod
    def _see(table: dict[str, Counter[str]], phase: str, peaks: Counter[str]) -> None:
        table[phase] = table.get(phase, Counter()) | peaks  # the elementwise maximum, by name

    def rows(self, rank: int, phase: str, ledger_peak: int) -> Iterator[MemoryRow]:
        """Yields the allocator's rows of a phase. `ledger_peak`: the ledger's peak bytes in the same memory."""
        peaks = self.of.get(phase)
        if not peaks:
            return
        sizes = Counter(peaks)  # a copy: `peaks` lacks the names that were 0 all the time
        sizes["outside_ledger"] = peaks["allocated"] - ledger_peak
        sizes["fragmentation"] = peaks["reserved"] - peaks["allocated"]
        for category in self._categories:
            yield MemoryRow(rank, phase, category, None, None, sizes[category])
