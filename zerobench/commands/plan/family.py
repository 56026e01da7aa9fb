"""ZeRO's own family of GPTs as an axis: shapes in the order of their parameters.

The hidden sizes are the paper's (arXiv 1910.02054v3, appendix, tables 4 to 8), each up to the most layers that it has
there; the last is that of its trillion-parameter model (ZeRO-Infinity, arXiv 2104.07857, table 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...config.cell import Cell
from ...config.schema import Gpt
from .axis import Axis


@dataclass(frozen=True)
class Shape:
    """Blocks, their width, and heads."""

    layers: int
    hidden: int
    heads: int

    @property
    def numel(self) -> int:
        """Parameters of the blocks' matrices: 12 · layers · hidden²."""
        return 12 * self.layers * self.hidden**2


WIDTHS = (
    Shape(54, 1920, 16), Shape(64, 2304, 24), Shape(72, 3072, 24), Shape(62, 4096, 32), Shape(132, 6144, 32),
    Shape(212, 8192, 64), Shape(128, 25600, 256),
)  # fmt: skip
"""A width and the most layers that the papers have with it."""


def shapes() -> list[Shape]:
    """Returns all shapes of the family by size: a width begins where the one before has ended."""
    found: list[Shape] = []
    for deepest in WIDTHS:
        before = found[-1].numel if found else 0
        found += [one for one in _of_width(deepest) if one.numel > before]
    return found


def _of_width(deepest: Shape) -> list[Shape]:
    return [replace(deepest, layers=layers) for layers in range(1, deepest.layers + 1)]


def family_axis() -> Axis:
    """Returns the axis of the family: places in `shapes`, the load about a line in the number of parameters."""
    family = shapes()

    def changed(cell: Cell, place: int) -> Cell:
        one, model = family[place], cell.config.model
        assert isinstance(model, Gpt)
        return cell.changed(model=replace(model, layers=one.layers, hidden=one.hidden, heads=one.heads))

    return Axis("shape", range(len(family)), (1, 3), changed, lambda place: float(family[place].numel), in_states=True)
