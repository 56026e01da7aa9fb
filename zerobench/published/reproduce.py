"""Executes the cells of rows, each cell once, and holds slopes against what is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..config.compose import compose_cells
from ..fake_execution import Execution, Target, execute
from .row import Parts, Row

Cell = tuple[Target, str]
"""The device that a cell stands for, and its command line."""

Run = Callable[[Target, Sequence[str]], Iterable[Execution]]
"""Executes command lines on a target, in order."""


@dataclass(frozen=True)
class Reproduced:
    """A row with what was executed. `executed`: None where nothing was, or where `problem` says why it cannot be.

    `total`: bytes, elements or FLOPs of the larger cell; `whole`: over its size, in the row's unit. `in_flight`: what
    of `total` does not grow with the model, by part.
    """

    source: str
    row: Row
    executed: float | None = None
    total: float | None = None
    whole: float | None = None
    in_flight: Parts | None = None
    problem: str = ""

    @property
    def difference(self) -> float | None:
        """Executed less printed; less the right value where that is a misprint."""
        return None if self.executed is None else self.executed - self.row.right

    @property
    def is_within(self) -> bool | None:
        """True where the executed value is within the printed precision of the right one; None without execution."""
        return None if self.difference is None else abs(self.difference) <= self.row.margin

    @property
    def verdict(self) -> str:
        """In words: yes, no and why, or that the source is misprinted."""
        if self.problem:
            return f"not executed: {self.problem}"
        words = f"misprint, right is {self.row.misprint}" if self.row.misprint else ""
        if self.is_within is None:
            return words or self.row.note
        if self.is_within:
            return words or "yes"
        return "; ".join(part for part in ("no", words, self.row.note) if part)


def reproduce(rows: Sequence[tuple[str, Row]], run: Run | None = None) -> list[Reproduced]:
    """Executes all cells of (source, row) pairs and returns the rows with their values, in order."""
    executed = _executed(dict.fromkeys((row.target, words) for _, row in rows for words in row.cells), run or here)
    return [_reproduced(source, row, executed) for source, row in rows]


def here(target: Target, lines: Sequence[str]) -> Iterator[Execution]:
    """Executes command lines in this process, one after the other: the models are ours, and small."""
    for words in lines:
        yield execute(compose_cells(words.split())[0].config, target=target)


def _executed(cells: Iterable[Cell], run: Run) -> dict[Cell, Execution]:
    lines: dict[Target, list[str]] = {}
    for target, words in cells:
        lines.setdefault(target, []).append(words)
    return {
        (target, words): one
        for target, mine in lines.items()
        for words, one in zip(mine, run(target, mine), strict=True)
    }


def _reproduced(source: str, row: Row, executed: Mapping[Cell, Execution]) -> Reproduced:
    found = [executed[row.target, words] for words in row.cells]
    if problem := next((one.problem for one in found if one.problem), ""):
        return Reproduced(source, row, problem=problem)
    try:
        return _held(source, row, found)
    except ValueError as error:
        return Reproduced(source, row, problem=str(error))


def _held(source: str, row: Row, found: Sequence[Execution]) -> Reproduced:
    slope, rest = slope_of(row, *found[:2])
    total = sum(row.of(found[1]).values())
    if row.less:
        taken, left = slope_of(row, *found[2:])
        slope, total = slope - taken, total - sum(row.of(found[3]).values())
        rest = {part: size - left.get(part, 0.0) for part, size in rest.items()}
    whole = total / row.over(found[1]) * row.scale
    return Reproduced(source, row, slope * row.scale, total, whole, rest)


def slope_of(row: Row, smaller: Execution, larger: Execution) -> tuple[float, Parts]:
    """Returns how the quantity grows with the size, and what of the larger one does not, by part. Raises ValueError
    where the size does not grow.
    """
    before, after = row.of(smaller), row.of(larger)
    size, growth = row.over(larger), row.over(larger) - row.over(smaller)
    if growth <= 0:
        raise ValueError("both cells are of one size")
    slopes = {part: (after.get(part, 0.0) - before.get(part, 0.0)) / growth for part in {**before, **after}}
    rest = {part: after.get(part, 0.0) - slope * size for part, slope in slopes.items()}
    return sum(slopes.values()), rest
