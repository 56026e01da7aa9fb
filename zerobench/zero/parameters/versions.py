"""Write detection by autograd's version counters: every in-place operation adds one.

A detached tensor has the counter of its source, one from `.data` its own. (`_version` is torch's; tested.)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .absent import as_they_are


class Versions:
    """The versions of `parameters` at the last call of `note`."""

    def __init__(self, parameters: Sequence[nn.Parameter] = ()) -> None:
        self.parameters = parameters
        self.note()

    def note(self) -> None:
        """Records the current versions."""
        with as_they_are():
            self._known = [parameter._version for parameter in self.parameters]

    def written(self) -> list[nn.Parameter]:
        """Returns the parameters that have been written to since the last `note`."""
        with as_they_are():
            now = [parameter._version for parameter in self.parameters]
        if now == self._known:
            return []
        before, self._known = self._known, now
        return [p for p, old, new in zip(self.parameters, before, now, strict=True) if old != new]
