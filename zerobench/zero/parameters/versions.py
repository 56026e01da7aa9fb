"""How often tensors have been written to, as autograd counts it: every operation in place adds one.

A detached tensor shares the count, one from `.data` has its own. (`_version` is torch's; tested.)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .absent import as_they_are


class Versions:
    """Those of `parameters`, as they were at the last look."""

    def __init__(self, parameters: Sequence[nn.Parameter] = ()) -> None:
        self.parameters = parameters
        self.note()

    def note(self) -> None:
        """What was written so far is known."""
        with as_they_are():
            self._known = [parameter._version for parameter in self.parameters]

    def written(self) -> list[nn.Parameter]:
        """The parameters that have been written to since the last look."""
        with as_they_are():
            now = [parameter._version for parameter in self.parameters]
        if now == self._known:
            return []
        before, self._known = self._known, now
        return [p for p, old, new in zip(self.parameters, before, now, strict=True) if old != new]
