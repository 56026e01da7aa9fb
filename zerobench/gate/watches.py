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

        name     tells several watches of a test apart
        limits   of this watch in place of the marker's, as {"peak": "<= 24 GiB"}

        Raises GateError for a name that is taken, and what Watch raises.
        """
        cell = f"{self._test} {name}".strip()
        if cell in self.made:
            raise GateError(f"zerobench_watch: {cell} has been watched; give each watch of a test a name= of its own")
        hand = None if limits is None else hand_limits(limits)
        watch = Watch(model, optimizer, name=f"{self._prefix}{cell}", **({"to": self._to} | options))
        self.made[cell] = WatchedByTest(cell, watch, largest_unit_bytes(watch.model), hand)
        return watch

    def end(self) -> None:
        """Removes the hooks of watches that the test has left running."""
        for one in self.made.values():
            if one.watch.state not in (NEW, STOPPED):
                one.watch.stop(GateError("the test has ended"))


def largest_unit_bytes(model: nn.Module) -> int:
    """Returns the bytes of the parameters that FSDP2 gathers at once, the most of any group; of another model, those of
    its largest unit as stage 3 divides it: a block, or all parameters that are in none.
    """
    grouped = [(name, m) for name, m in model.named_modules() if _is_fully_sharded(m)]
    units = [(name, m) for name, m in grouped if m is not model] if grouped else default_units(model)
    sums: dict[str, int] = {}
    for parameter, unit in unit_of_parameters(model, units).items():
        numel = getattr(parameter, "ds_numel", None) or parameter.numel()
        sums[unit] = sums.get(unit, 0) + numel * parameter.element_size()
    return max(sums.values(), default=0)


def _is_fully_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
