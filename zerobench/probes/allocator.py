"""CUDA's allocator by phase, beside the ledger: its peaks are taken and start anew wherever a phase begins.

The allocator's counters live on the host and move when a tensor is made or freed there, as the ledger does, so a phase
is the same stretch of time for both, whatever the device is still busy with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from ..records import ALLOCATOR, MemoryRow


def nothing() -> dict[str, int]:
    """The peaks where no allocator keeps any: on a CPU."""
    return {}


class PhasePeaks:
    """`take`: the peaks by name since the last call (probes/cuda.py). `begin` and `end` bound a stretch, as they do for
    the ledger; `of` has the largest of each phase and of each whole stretch, by name.
    """

    def __init__(self, take: Callable[[], Mapping[str, int]]) -> None:
        self.of: dict[str, Counter[str]] = {}
        self._take = take
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
        for phase, peaks in self._stretch.items():
            self._see(self.of, phase, peaks)
            self._see(self.of, whole, peaks)

    @staticmethod
    def _see(table: dict[str, Counter[str]], phase: str, peaks: Counter[str]) -> None:
        table[phase] = table.get(phase, Counter()) | peaks  # the larger of the two, name by name

    def rows(self, rank: int, phase: str, ledger_peak: int) -> Iterator[MemoryRow]:
        """The allocator's rows of a phase. `ledger_peak`: the ledger's bytes on the GPU at most in this phase."""
        peaks = self.of.get(phase)
        if not peaks:
            return
        derived = {
            "outside_ledger": peaks["allocated"] - ledger_peak,
            "fragmentation": peaks["reserved"] - peaks["allocated"],
        }
        for category in ALLOCATOR:
            size = {**peaks, **derived}.get(category, 0)  # a Counter has no names of what was 0 all the time
            yield MemoryRow(rank, phase, category, None, None, size)
