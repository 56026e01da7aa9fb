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
