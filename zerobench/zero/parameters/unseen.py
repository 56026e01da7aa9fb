"""Writes that versions do not show, found on a GPU while an update runs.

The host must not wait for a comparison there. A tile's parameters are compared with its rounded masters while both are
in the GPU's cache, right before its update, which then replaces what was written. Of a unit that has masters alone, the
gathered slice is compared with them before its memory is freed. So such a write is lost, and an error at a later step
says so: at the next one, or the one after if the answer has not arrived yet.

    answers    (pieces + segments,) at most one for each comparison of this step: True if any bit differs
    found      (pieces + segments,) on the device: the answers of all steps since the last error
    seen       (pieces + segments,) the same in host memory, as far as it has arrived; read without waiting

A comparison is three kernels; that of a tile makes no tensor after the first update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..unit_tensors import UnitTensors
from .versions import Versions

MasterPart = tuple[UnitTensors, int, torch.Tensor, list[int]]
"""A tile's part of a unit: its first element in the shard, its masters, and the numbers of their parameters. With the
gaps between segments it is whole 64-bit words.
"""

PIECE = 2**22
"""Elements of a gathered slice that are compared at a time, with 2 bytes of temporary memory for each."""


class UnseenWrites:
    """The comparisons of all tiles, and of the `units` with masters alone. `masters`: noted before the hooks of a step,
    which may write to them. `scratch`: memory of a tile's gradients, which come after its comparison.

    `hooks_write`  True once a hook has done so: then parameters must be compared before the hooks
    """

    def __init__(self, masters: Versions, scratch: torch.Tensor, units: Sequence[UnitTensors]) -> None:
        self._masters, self._scratch = masters, scratch
        self.hooks_write = self._is_asked = False
        self._about: list[Sequence[int]] = []  # the parameters of each answer
        self._views: dict[int, list[tuple[torch.Tensor, ...]]] = {}  # of each tile
        self._places = {unit: self._reserve(unit) for unit in units}  # of the answers about its pieces
        slots = len(self._about) + len(masters.parameters)
        self._answers, self._found = torch.zeros(2, slots, dtype=torch.bool, device=scratch.device)
        self._host = torch.zeros(self._found.shape, dtype=torch.bool, pin_memory=self._found.is_cuda)
        self._seen = self._host.numpy()  # reads of it are no operators, which might wait

    def compare(self, parts: Sequence[MasterPart]) -> None:
        """Compares the parameters of a tile's parts with their rounded masters, bit by bit."""
        self.hooks_write = self.hooks_write or (not self._is_asked and self._masters.have_moved)
        if not self.hooks_write:
            self._is_asked = True
            views = self._views.get(id(parts)) or self._views.setdefault(id(parts), [*map(self._views_of, parts)])
            for master, rounded, bits, written, answer in views:
                rounded.copy_(master)
                torch.any(bits.bitwise_xor_(written), out=answer)

    def _reserve(self, unit: UnitTensors) -> slice:
        first, segments = len(self._about), [*unit.layout.segments(unit.rank)]
        for start in range(0, unit.shard_numel, PIECE):
            here = [one for one in segments if one.offset < start + PIECE and start < one.offset + one.numel]
            self._about.append([one.parameter for one in here])
        return slice(first, len(self._about))

    def compare_gathered(self, unit: UnitTensors) -> None:
        """Compares a unit's gathered slice with its rounded masters, bit by bit."""
        place = self._places[unit]
        views = self._views.get(id(unit)) or self._views.setdefault(id(unit), [*self._pieces_of(unit)])
        for master, own, written, answer in views:
            torch.any(master.to(own.dtype).view(torch.int64).ne(written), out=answer)
        self._found[place].logical_or_(self._answers[place])

    def _pieces_of(self, unit: UnitTensors) -> Iterator[tuple[torch.Tensor, ...]]:
        pieces = (tensor.split(PIECE) for tensor in (unit.parameter_shard, unit.own_slice(unit.full_parameters)))
        for master, own, answer in zip(*pieces, self._answers[self._places[unit]], strict=True):
            yield master, own, own.view(torch.int64), answer

    def _views_of(self, part: MasterPart) -> tuple[torch.Tensor, ...]:
        unit, start, master, numbers = part
        self._about.append(numbers)
        rounded = self._scratch.view(unit.dtypes.parameters)[: master.numel()]
        written = unit.parameter_shard[start : start + master.numel()].view(torch.int64)
        return master, rounded, rounded.view(torch.int64), written, self._answers[len(self._about) - 1]

    def send(self) -> None:
        """Sends the answers to the host when the update has been launched."""
        if self._is_asked:
            self._is_asked = False
            self._found.logical_or_(self._answers)
        self._host.copy_(self._found, non_blocking=True)

    def take(self, waits: bool) -> list[int]:
        """Returns the numbers of parameters of which some were written to, and forgets them. `waits`: for all answers;
        otherwise those that have arrived.
        """
        self._is_asked = False  # by an update that has failed
        if waits:
            self._host.copy_(self._found)
        found = {number for place in self._seen.nonzero()[0] for number in self._about[place]}
        if found:
            self._answers.zero_()
            self._host.copy_(self._found.zero_())  # waits, so that no earlier copy arrives later
        return sorted(found)
