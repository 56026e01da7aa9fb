"""Writes that versions do not show, found on a GPU by the kernel that updates the masters (optim/one_pass.py).

The host must not wait for a comparison there. The kernel reads each parameter that it is about to replace, and sets its
segment's flag if that is not the rounded master. So such a write is lost, and an error at a later step says so: at the
next one, or the one after if the flags have not arrived yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class UnseenWrites:
    """The flags of segments. `numbers`: of the segments' parameters.

    `flags`  (segments,) int32 on the device, set for all steps since the last error
    """

    def __init__(self, numbers: Sequence[int], device: torch.device) -> None:
        self._numbers = numbers
        self.flags = torch.zeros(len(numbers), dtype=torch.int32, device=device)
        self._host = torch.zeros(len(numbers), dtype=torch.int32, pin_memory=self.flags.is_cuda)
        self._seen = self._host.numpy()  # reads of it are no operators, which might wait

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
