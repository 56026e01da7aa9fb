"""The fixture `zerobench_watch`: watches of one test, kept until the test's body has passed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..watching import Watch
from ..watching.watch import NEW, STOPPED
from ..zero.modules.wrapping import default_units, unit_of_parameters
from .limits import GateError, HandLimit, hand_limits


@dataclass(frozen=True)
class WatchedByTest:
    """A watch of a test. `name`: its cell; `unit`: bytes of the largest unit; `limits`: None for the marker's."""

    name: str
    watch: Watch
    unit: int
    limits: tuple[HandLimit, ...] | None


class Watches:
    """Makes the watches of a test: `zerobench.watch` with the test's name. Called once, or several times by name."""

    def __init__(self, test: str, prefix: str, to: Path | None) -> None:
        self._test, self._prefix, self._to = test, prefix, to
        self.made: dict[str, WatchedByTest] = {}

    def __call__(
        self, model: Any, optimizer: Any = None, *, name: str = "", limits: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Watch:  # fmt: skip
        """Returns a watch; `options` are those of `zerobench.watch`.

        name     distinguishes several watches of a test
        limits   of this watch, instead of the marker's, such as {"peak": "<= 24 GiB"}

        Raises GateError if the name is taken, and the errors of Watch.
        """
        cell = f"{self._test} {name}".strip()
        if cell in self.made:
            raise GateError(f"zerobench_watch: {cell} has been watched; give each watch of a test a name= of its own")
        hand = None if limits is None else hand_limits(limits)
        watch = Watch(model, optimizer, name=f"{self._prefix}{cell}", **({"to": self._to} | options))
        self.made[cell] = WatchedByTest(cell, watch, largest_unit_bytes(watch.model), hand)
        return watch

    def end(self) -> None:
        """Removes the hooks of watches that the test left running."""
        for one in self.made.values():
            if one.watch.state not in (NEW, STOPPED):
                one.watch.stop(GateError("the test has ended"))


def largest_unit_bytes(model: nn.Module) -> int:
    """Returns the bytes of the largest group of parameters that FSDP2 gathers at a time; for other models, of the
    largest unit of stage 3: a block, or all parameters outside of blocks.
    """
    modules = [(name, m, [kind.__name__ for kind in type(m).__mro__]) for name, m in model.named_modules()]
    grouped = [(name, m) for name, m, kinds in modules if "FSDPModule" in kinds]
    units = [(name, m) for name, m in grouped if m is not model] if grouped else default_units(model)
    sums: dict[str, int] = {}
    for parameter, unit in unit_of_parameters(model, units).items():
        numel = getattr(parameter, "ds_numel", None) or parameter.numel()
        sums[unit] = sums.get(unit, 0) + numel * parameter.element_size()
    return max(sums.values(), default=0)
