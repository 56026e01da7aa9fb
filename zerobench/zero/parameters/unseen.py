"""Writes that versions do not show, found on a GPU while an update runs.

The host must not wait for a comparison there. A tile's parameters are compared with its rounded masters while both are
in the GPU's cache, right before its update, which then replaces what was written. So such a write is lost, and an error
at a later step says so: at the next one, or the one after if the answer has not arrived yet.

    answers    0-dim, one for each comparison of this update: True if any bit differs
    found      (comparisons,) on the device: the answers of all updates since the last error
    seen       (comparisons,) the same in host memory, as far as it has arrived; read without waiting
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .versions import Versions


class UnseenWrites:
    """The comparisons of all tiles. `masters`: noted before the hooks of a step, which may write to them.

    `hooks_write`  True once a hook has done so: then parameters must be compared before the hooks
    """

    def __init__(self, masters: Versions) -> None:
        self._masters = masters
        self.hooks_write = False
        self._asked: list[tuple[Sequence[int], torch.Tensor]] = []  # numbers of parameters, and the answer
        self._about: list[Sequence[int]] = []  # the parameters of each answer
        self._found: torch.Tensor | None = None

    def compare(self, written: torch.Tensor, rounded: torch.Tensor, numbers: Sequence[int]) -> None:
        """Compares (numel,) parameters with their rounded masters, whole 64-bit words, bit by bit."""
        self.hooks_write = self.hooks_write or (not self._asked and self._masters.have_moved)
        if not self.hooks_write:
            self._asked.append((numbers, torch.any(written.view(torch.int64) != rounded.view(torch.int64))))

    def send(self) -> None:
        """Sends the answers to the host when the update has been launched."""
        if not self._asked:
            return
        answers = torch.stack([answer for _, answer in self._asked])
        self._about = [numbers for numbers, _ in self._asked]
        self._asked.clear()
        if self._found is None:
            self._found = torch.zeros_like(answers)
            self._host = torch.zeros(answers.shape, dtype=torch.bool, pin_memory=answers.is_cuda)
            self._seen = self._host.numpy()  # reads of it are no operators, which might wait
        self._found.logical_or_(answers)
        self._host.copy_(self._found, non_blocking=True)

    def take(self, waits: bool) -> list[int]:
        """Returns the numbers of parameters of which some were written to, and forgets them. `waits`: for all answers;
        otherwise those that have arrived.
        """
        self._asked.clear()  # of an update that has failed
        if self._found is None:
            return []
        if waits:
            self._host.copy_(self._found)
        found = {number for place in self._seen.nonzero()[0] for number in self._about[place]}
        if found:
            self._host.copy_(self._found.zero_())  # waits, so that no earlier copy arrives later
        return sorted(found)
