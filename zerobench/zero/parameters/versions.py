"""Detection of writes by autograd's version counters, which every in-place operation increments, and by fingerprints.

A detached tensor shares the counter of its source, a tensor from `.data` has its own. (`_version` is torch-private;
tested.)

A fingerprint is a number that changes when a tensor's values change, for writes that version counters do not see:
`.data` has its own counter, NumPy's views and other libraries' kernels have none. It depends on the bits and the
position of every element; two different tensors have equal ones with a probability of about 2^-64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .absent import as_they_are


class Versions:
    """The versions of `parameters` at the last call of `note`."""

    def __init__(self, parameters: Sequence[nn.Parameter] = ()) -> None:
        self.parameters = parameters
        self.note()

    def note(self) -> None:
        """Records the current versions."""
        self._known = self._now()

    @property
    def have_moved(self) -> bool:
        """True after a write to any parameter, until the next `note` or `written`."""
        return self._now() != self._known

    def _now(self) -> list[int]:
        with as_they_are():
            return [parameter._version for parameter in self.parameters]

    def written(self) -> list[nn.Parameter]:
        """Returns the parameters that have been written to since the last `note`."""
        now = self._now()
        if now == self._known:
            return []
        before, self._known = self._known, now
        return [p for p, old, new in zip(self.parameters, before, now, strict=True) if old != new]


CHUNKS = {"cpu": 2**12}
"""Device type -> words of 64 bits that are mixed at a time, so that a fingerprint needs 64 KiB of extra memory."""

LARGE_CHUNK = 2**20
"""The same on other devices, whose kernels take long to launch: 16 MiB of extra memory."""

_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: odd, with no pattern in its bits


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the fingerprint of a contiguous (numel,) tensor of whole 64-bit words: int64, 0-dim, on its device."""
    whole = tensor.view(torch.int64)
    chunk = max(1, min(CHUNKS.get(tensor.device.type, LARGE_CHUNK), whole.numel()))
    weights = _weights(chunk, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for words in whole.split(chunk):
        mixed = words >> 29  # so that the highest bits, signs for example, reach the lower ones
        mixed.bitwise_xor_(words).mul_(weights[: words.numel()])
        total.mul_(_MULTIPLIER).add_(mixed.sum())
    return total


def _weights(chunk: int, device: torch.device) -> torch.Tensor:
    """Returns (chunk,) odd numbers, one for each position in a chunk."""
    numbers = torch.arange(1, chunk + 1, dtype=torch.int64, device=device).mul_(_MULTIPLIER)
    return numbers.bitwise_xor_(numbers >> 31).mul_(_MULTIPLIER).bitwise_or_(1)
