"""The allocator by phase, beside the ledger: its peaks are taken and start anew wherever a phase begins.

Its counters live on the host, CUDA's too, and move when a tensor is made or freed there, as the ledger does, so a phase
is the same stretch of time for both, whatever the device is still busy with. Which allocator: allocator_total.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..records import ALLOCATOR, MemoryRow
from .ledger_maxima import ASIDE

IN_MEMORY = ("allocated", "outside_ledger")
"""What of ALLOCATOR there is of an allocator that keeps nothing back: a CPU's."""


def nothing() -> dict[str, int]:
    """The peaks where no allocator keeps any."""
    return {}


class PhasePeaks:
    """`take`: the peaks by name since the last call, "allocated" and on CUDA those of probes/cuda_memory.py;
    `categories`: the rows that there are of them. `begin` and `end` bound a stretch, as they do for
    the ledger; `of` has the largest of each phase and of each whole stretch, by name.
    """

    def __init__(self, take: Callable[[], Mapping[str, int]], categories: Sequence[str] = ALLOCATOR) -> None:
        self.of: dict[str, Counter[str]] = {}
        self._take, self._categories = take, categories
        self._phase = "init"
        self._stretch: dict[str, Counter[str]] = {}

    def enter_phase(self, phase: str) -> None:
        """What was allocated until now belongs to the phase before, what comes to `phase`."""
        self._see(self._stretch, self._phase, Counter(self._take()))
        self._phase = phase

    def begin(self) -> None:
        """A stretch begins: forgets what was since the last."""
        self._take()
        self._stretch = {}

    def end(self, whole: str) -> None:
        """The stretch is over: its phases go into `of`, and the largest of them as `whole`."""
        self.enter_phase(self._phase)
        self._stretch.pop(ASIDE, None)
        for phase, peaks in self._stretch.items():
            self._see(self.of, phase, peaks)
            self._see(self.of, whole, peaks)

    @staticmethod
    def _see(table: dict[str, Counter[str]], phase: str, peaks: Counter[str]) -> None:
        table[phase] = table.get(phase, Counter()) | peaks  # the larger of the two, name by name

    def rows(self, rank: int, phase: str, ledger_peak: int) -> Iterator[MemoryRow]:
        """The allocator's rows of a phase. `ledger_peak`: the ledger's bytes in the same memory at most."""
        peaks = self.of.get(phase)
        if not peaks:
            return
        sizes = Counter(peaks)  # not `peaks` itself; it has no names of what was 0 all the time
        sizes["outside_ledger"] = peaks["allocated"] - ledger_peak
        sizes["fragmentation"] = peaks["reserved"] - peaks["allocated"]
        for category in self._categories:
            yield MemoryRow(rank, phase, category, None, None, sizes[category])
