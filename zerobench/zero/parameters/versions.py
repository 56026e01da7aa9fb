"""Write detection by autograd's version counters: every in-place operation adds one.

A detached tensor has the counter of its source, one from `.data` its own. (`_version` is torch's; tested.)

A number that changes when a tensor's values change, for writes that autograd's version counters do not see.

`.data` has a counter of its own, NumPy's views and kernels of others have none. A fingerprint depends on the bits of
every element and on its position; two different tensors have equal ones with a probability of about 2^-64.
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
        """True from a write to one of them until the next `note` or `written`."""
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
"""Device type -> words of 64 bits that are mixed at once, so that a fingerprint needs 64 KiB beside the tensor."""

LARGE_CHUNK = 2**20
"""The same on other devices, whose kernels take long to launch: 16 MiB beside the tensor."""

_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: odd, with no pattern in its bits


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the fingerprint of a contiguous (numel,) tensor, whole words of 64 bits: int64, 0-dim, on its device."""
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
    """(chunk,) odd numbers, one for each position of a chunk."""
    numbers = torch.arange(1, chunk + 1, dtype=torch.int64, device=device).mul_(_MULTIPLIER)
    return numbers.bitwise_xor_(numbers >> 31).mul_(_MULTIPLIER).bitwise_or_(1)
