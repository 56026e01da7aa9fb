"""Writes that versions do not show, found on a GPU by the kernel that updates the masters (optim/one_pass.py).

The host must not wait for a comparison there. The kernel reads each parameter that it is about to replace, and sets its
segment's flag if that is not the rounded master. So such a write is lost, and an error at a later step says so: at the
next one, or the one after if the flags have not arrived yet. If there is none, stderr says it at the engine's end.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

OVERWRITTEN = (
    "it was written to between steps or in a forward by .data, or in another way that autograd does not count; on a GPU"
    " that is found after the values were replaced: they are lost; write in place under torch.no_grad() (`p.clamp_()`),"
    " or inside `with engine.full_parameters()`"
)


class UnseenWrites:
    """The flags of segments. `numbers`: of the segments' parameters; `names`: of parameters, by number.

    `flags`  (segments,) int32 on the device, set for all steps since the last error
    """

    def __init__(self, numbers: Sequence[int], names: Sequence[str], device: torch.device) -> None:
        self._numbers = numbers
        self.flags = torch.zeros(len(numbers), dtype=torch.int32, device=device)
        self._host = torch.zeros(len(numbers), dtype=torch.int32, pin_memory=self.flags.is_cuda)
        self._seen = self._host.numpy()  # reads of it are no operators, which might wait
        weakref.finalize(self, _report, self._seen, [names[number] for number in numbers])

    def send(self) -> None:
        """Sends the flags to the host when the update has been launched."""
        self._host.copy_(self.flags, non_blocking=True)

    def found(self, waits: bool) -> int | None:
        """Returns the number of a parameter that was written to. `waits`: for all flags; otherwise for none."""
        if waits:
            self._host.copy_(self.flags)
        return max((self._numbers[int(segment)] for segment in self._seen.nonzero()[0]), default=None)

    def forget(self) -> None:
        """Forgets all writes."""
        self._host.copy_(self.flags.zero_())  # waits, so that no earlier copy arrives later


def _report(seen: Any, names: list[str]) -> None:
    """Prints the writes that no step has raised an error for, at the end of the engine or of the program."""
    written = dict.fromkeys(names[segment] for segment in seen.nonzero()[0])
    sys.stderr.writelines(f"{name}: {OVERWRITTEN}\n" for name in written)
