"""The desync check: unit and step are sent in the padding of a collective's buffer, and the receiving rank checks them.

Otherwise ranks whose control flow differs (one skips a layer that another runs) would silently match collectives of
equal size, and train on each other's layers. The last STAMP_NUMEL elements of a full buffer hold the stamp::

    | ... parameters ... | padding | unit: 4 digits | step: 4 digits |       of base 16, the highest first

The step is taken modulo 65536. The digits 0..15 are exact in every floating dtype.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .. import labels

STAMP_NUMEL = 8
"""Elements of padding at the end of a full buffer whose collectives are stamped."""

CheckEnd = Callable[[torch.Tensor], None]
"""Takes the end of a buffer and raises DesyncError if it holds another stamp."""

MOST_UNSENT = 4096
"""Limit of stamps that wait on a device for the end of a step: an evaluation may be long, and ends no step."""

_BASE, _DIGITS = 16, STAMP_NUMEL // 2
_MODULUS = _BASE**_DIGITS


class DesyncError(RuntimeError):
    """Raised if another rank is at a different unit or step."""


@dataclass(frozen=True)
class Stamp:
    """Unit number `unit` (below 65536) and step `step`, equal on all ranks. `describe`: unit number -> its name."""

    unit: int
    step: int
    describe: Callable[[int], str] = field(default=str, compare=False)

    def write(self, full: torch.Tensor) -> None:
        """Writes the digits into the last elements of `full`, (numel,) of a floating dtype."""
        # Pinned, so that the copy is asynchronous: copying from pageable memory would make the host wait for the GPU.
        digits = torch.tensor(self.digits(), dtype=full.dtype, pin_memory=full.is_cuda)
        full[-STAMP_NUMEL:].copy_(digits, non_blocking=True)

    def digits(self) -> list[int]:
        """Returns STAMP_NUMEL digits of base 16."""
        return [n % _MODULUS // _BASE**place % _BASE for n in (self.unit, self.step) for place in range(_DIGITS)[::-1]]

    def check(self, rank: int, end: torch.Tensor) -> None:
        """Raises DesyncError if `end`, the end of a slice that `rank` sent, holds another stamp."""
        found = end[-STAMP_NUMEL:].tolist()
        if found != self.digits():
            raise DesyncError(f"{self._read(rank, found)}, {self._here()}")

    def check_sum(self, ranks: int, end: torch.Tensor) -> None:
        """Raises DesyncError if `end`, the end of a sum over `ranks` ranks, is not that many times this stamp."""
        if end[-STAMP_NUMEL:].tolist() != [ranks * digit for digit in self.digits()]:
            raise DesyncError(f"another rank is elsewhere, {self._here()}")

    def _here(self) -> str:
        here = f"this rank at {self.describe(self.unit)} of step {self.step}"
        return f"{here}: all ranks must run the same modules in the same order"

    def _read(self, rank: int, digits: Sequence[float]) -> str:
        """Formats another rank's digits; the step is modulo 65536, so the value nearest to ours is meant."""
        if not all(digit in range(_BASE) for digit in digits):
            return f"rank {rank} sent no stamp"
        unit, step = (int("".join(f"{int(d):x}" for d in part), _BASE) for part in (digits[:_DIGITS], digits[_DIGITS:]))
        ahead = (step - self.step + _MODULUS // 2) % _MODULUS - _MODULUS // 2
        return f"rank {rank} is at unit {self.describe(unit)} of step {self.step + ahead}"


def sums_are_exact(dtype: torch.dtype, ranks: int) -> bool:
    """Returns True if sums of digits over so many ranks are exact in `dtype`; bfloat16 holds them up to 17 ranks."""
    return ranks * (_BASE - 1) <= 2 / torch.finfo(dtype).eps


class DeferredStamps:
    """Stamps on a device, checked without a synchronization: they are copied to the host asynchronously and checked
    once the copy has completed, usually one step later.
    """

    def __init__(self) -> None:
        self._unsent: list[tuple[CheckEnd, torch.Tensor]] = []
        self._sent: deque[tuple[list[CheckEnd], torch.Tensor, torch.cuda.Event | None]] = deque()

    def add(self, full: torch.Tensor, check: CheckEnd) -> None:
        """Keeps the end of `full` for `check`."""
        self._unsent.append((check, full[-STAMP_NUMEL:].to(torch.float64, copy=True)))
        if len(self._unsent) >= MOST_UNSENT:
            self.check()

    def check(self) -> None:
        """Raises RuntimeError if a stamp that has reached the host differs; starts copying the newest ones."""
        self._send()
        while self._sent and (self._sent[0][2] is None or self._sent[0][2].query()):
            checks, ends, _ = self._sent.popleft()
            for check, end in zip(checks, ends, strict=True):
                check(end)

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not unsent:
            return
        ends, event = torch.stack([end for _, end in unsent]), None  # one copy for all stamps of the step
        if ends.is_cuda:
            with labels.collective("control"):
                ends = torch.empty_like(ends, device="cpu", pin_memory=True).copy_(ends, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._sent.append(([check for check, _ in unsent], ends, event))
