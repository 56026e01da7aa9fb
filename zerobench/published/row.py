"""A published figure as a row of data, beside the cell that reproduces it.

printed    as the source has it: a number, which stands for all that round or are cut off to it, or an equation
formula    its value by theory/, or by the source's own equation where theory has none
cell       a command line; two of it are executed, a smaller and a larger one: `sizes` are the words that differ
executed   a *slope*: how much more the larger cell holds or moves, over how much larger it is. So nothing is
           subtracted: what does not grow with the model is the row's second figure, in flight
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..fake_execution import CPU, Execution, Target

Parts = dict[str, float]
"""Bytes, elements or FLOPs by what they are of; a quantity is their sum."""

LAYERS = ("model.layers=2", "model.layers=4")

EQUATION_SHARE = 0.001
"""An equation has no last digit; an executed value is held to it within this share."""


@dataclass(frozen=True)
class Row:
    """One figure. `where`: section, table or equation; `value`: of `printed`, in `unit`, at the cell's numbers.

    `digit`: a unit of the last digit of `printed`, None for an equation. `of`: what a cell holds or moves; `over`: its
    size; their slope times `scale` is the executed value. `less`: a cell whose slope is taken off, by name, for what a
    source states as a difference. `misprint`: what is wrong with what is printed; the formula is then right.
    `note`: what differs, and why, where the executed value is another one.
    """

    where: str
    quantity: str
    unit: str
    equation: str
    formula: float
    printed: str
    value: float
    cell: str
    of: Callable[[Execution], Parts]
    over: Callable[[Execution], float]
    digit: float | None = None
    scale: float = 1.0
    sizes: tuple[str, str] = LAYERS
    less: str = ""
    target: Target = CPU
    misprint: str = ""
    note: str = ""

    @property
    def right(self) -> float:
        """The value that an execution is held to."""
        return self.formula if self.misprint else self.value

    @property
    def margin(self) -> float:
        """Half of the range of values that the printed one stands for."""
        return EQUATION_SHARE * abs(self.right) if self.digit is None else self.digit

    @property
    def cells(self) -> tuple[str, ...]:
        """Command lines of the cells to execute: smaller and larger, then those of `less`."""
        return tuple(f"{words} {size}" for words in (self.cell, self.less) if words for size in self.sizes)
