"""A published figure as a row of data, next to the cells that reproduce it, and its value by their execution.

printed    as the source has it: a number, which stands for all that round or are cut off to it, or an equation
formula    its value by theory/, or by the source's own equation where theory has none
cell       a command line; two of it are executed, a smaller and a larger one: `sizes` are the words that differ
executed   a *slope*: how much more the larger cell holds or moves, over how much larger it is. So nothing is
           subtracted: what does not grow with the model is the row's second figure, in flight
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from zerobench.config.compose import compose_cells
from zerobench.predict.flops import step_flops
from zerobench.simulation.execute import CPU, Execution, Target
from zerobench.theory.closed_forms import between_nodes_formula, floor_bytes, volume_formula
from zerobench.theory.groups import GroupShape
from zerobench.theory.shapes import NOWHERE, OptimizerShape, ParameterShape, PrecisionShape, Schedule, TierShape
from zerobench.theory.strategy import DDP, MEGATRON, ZERO1, ZERO2, ZERO3, StrategyShape

from ..runner import execute_cells

Parts = dict[str, float]
"""Bytes, elements or FLOPs by what they are of; a quantity is their sum."""

LAYERS = ("model.layers=2", "model.layers=4")

GPT = "model=gpt model.hidden=1024 model.heads=8 model.vocabulary=1024 data=synthetic backend=simulated"
"""Words that the cells of many rows begin with. Slopes do not depend on the shape, so that it is small."""

BF16 = f"{GPT} precision=bf16"

PARAMETERS = "strategy.shards=parameters"
"""Stage 3 keeps parameters beside the masters, as the sources do; ours keeps masters alone by default, 2ψ/N less."""

BUCKETS = "strategy.bucket_bytes=8388608"
"""8 MiB: as many whole buckets in either cell as are ever in flight."""

EQUATION_SHARE = 0.001
"""An equation has no last digit; an executed value is held to it within this share."""


@dataclass(frozen=True)
class PublishedFigure:
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


@dataclass(frozen=True)
class Reproduced:
    """A row with what was executed. `executed`: None if nothing was, or where `problem` says why it cannot be.

    `total`: bytes, elements or FLOPs of the larger cell; `whole`: over its size, in the row's unit. `in_flight`: what
    of `total` does not grow with the model, by part.
    """

    source: str
    row: PublishedFigure
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
        """True if the executed value is within the printed precision of the right one; None without execution."""
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


def reproduce(rows: Sequence[tuple[str, PublishedFigure]]) -> list[Reproduced]:
    """Executes all cells of (source, row) pairs, each once, and returns the rows with their values, in order."""
    cells = list(dict.fromkeys((row.target, words) for _, row in rows for words in row.cells))
    work = [(compose_cells(words.split(), target=target.kind)[0].config, target) for target, words in cells]
    executed = dict(zip(cells, execute_cells("published", work), strict=True))
    return [_reproduced(source, row, executed) for source, row in rows]


def _reproduced(source: str, row: PublishedFigure, executed: Mapping[tuple[Target, str], Execution]) -> Reproduced:
    found = [executed[row.target, words] for words in row.cells]
    if problem := next((one.problem for one in found if one.problem), ""):
        return Reproduced(source, row, problem=problem)
    try:
        slope, rest = slope_of(row, *found[:2])
        total = sum(row.of(found[1]).values())
        if row.less:
            taken, left = slope_of(row, *found[2:])
            slope, total = slope - taken, total - sum(row.of(found[3]).values())
            rest = {part: size - left.get(part, 0.0) for part, size in rest.items()}
    except ValueError as error:
        return Reproduced(source, row, problem=str(error))
    whole = total / row.over(found[1]) * row.scale
    return Reproduced(source, row, slope * row.scale, total, whole, rest)


def slope_of(row: PublishedFigure, smaller: Execution, larger: Execution) -> tuple[float, Parts]:
    """Returns how the quantity grows with the size, and what of the larger one does not, by part. Raises ValueError
    if the size does not grow.
    """
    before, after = row.of(smaller), row.of(larger)
    size, growth = row.over(larger), row.over(larger) - row.over(smaller)
    if growth <= 0:
        raise ValueError("both cells are of one size")
    slopes = {part: (after.get(part, 0.0) - before.get(part, 0.0)) / growth for part in {**before, **after}}
    rest = {part: after.get(part, 0.0) - slope * size for part, slope in slopes.items()}
    return sum(slopes.values()), rest


HALF_BYTES = 2
"""Bytes of an element of parameters, which M of ZeRO-Offload and ZeRO++ counts in."""


# -- sizes ------------------------------------------------------------------------------------------


def psi(one: Execution) -> float:
    """Trained parameters, ψ."""
    return float(sum(shape.numel for shape in one.result.schedule.shapes if shape.trainable))


def per_size(*names: str) -> Callable[[Execution], float]:
    """Returns the product of sizes of a cell: L layers, h hidden, b sequences, s tokens of one; one may come twice."""

    def size(one: Execution) -> float:
        options = one.config.model_options
        sizes = {"L": options["layers"], "h": options["hidden"], "b": one.config.micro_batch, "s": one.config.sequence}
        return float(prod(sizes[name] for name in names))

    return size


# -- memory -----------------------------------------------------------------------------------------


def states(one: Execution) -> Parts:
    """Bytes of the states on the device, at the instant where their sum is largest."""
    return {category: float(size) for category, size in one.at_most_states.items()}


def most_of(category: str) -> Callable[[Execution], Parts]:
    """Returns the largest sum of one category on the device."""

    def most(one: Execution) -> Parts:
        rows = [row for row in one.result.memory if (row.phase, row.tier) == ("step", "device")]
        return {category: float(sum(row.max_bytes for row in rows if row.category == category))}

    return most


# -- traffic ----------------------------------------------------------------------------------------


def volume(one: Execution) -> Parts:
    """Elements that the rank moves in a step, by collective, as the paper counts them."""
    return _sums(one, "volume_elements")


def moved(*kinds: str) -> Callable[[Execution], Parts]:
    """Returns payload bytes in a step by kind of collective or link."""
    return lambda one: {kind: size for kind, size in _sums(one, "payload_bytes").items() if kind in kinds}


def between_nodes(*where: tuple[str, str]) -> Callable[[Execution], Parts]:
    """Returns bytes that cross nodes in (phase, kind) collectives, in units of 2-byte elements of the whole model: each
    of N ranks in Z nodes sends (Z - 1)/N of what a collective moves.
    """

    def crossing(one: Execution) -> Parts:
        ranks = one.config.world_size
        nodes = ranks // (one.config.node_size or ranks)
        whole = ranks / (nodes - 1) / HALF_BYTES
        rows = [row for row in one.result.traffic if not row.control]
        return {
            f"{phase} {kind}": whole * sum(r.between_bytes for r in rows if (r.phase, r.kind) == (phase, kind))
            for phase, kind in where
        }

    return crossing


def _sums(one: Execution, column: str) -> Parts:
    sums: Parts = {}
    for row in one.result.traffic:
        if not row.control:
            sums[row.kind] = sums.get(row.kind, 0.0) + getattr(row, column)
    return sums


# -- arithmetic -------------------------------------------------------------------------------------


def flops(one: Execution) -> Parts:
    """FLOPs of a step, with what is computed again; torch's counter over the model without memory."""
    counted = step_flops(one.config)
    if counted is None:
        raise ValueError("the model reads values, so that its FLOPs cannot be counted without a run")
    return {"FLOPs": float(counted.hardware)}


def sum_of(parts: Callable[[Execution], Parts]) -> Callable[[Execution], float]:
    return lambda one: sum(parts(one).values())


# -- values of theory's closed forms per parameter -------------------------------------------------


PSI = 10**9
ADAM = OptimizerShape(2, 1)
MIXED = PrecisionShape(2, 2)
"""Half-precision gradients, cast to fp32 tile by tile."""
AT_ONCE = PrecisionShape(2, 2, None)
"""Half-precision gradients, cast to fp32 all at once."""
WIDE = PrecisionShape(4, 4)
"""fp32 gradients."""

THEORIES = {"ddp": DDP, "zero1": ZERO1, "zero2": ZERO2, "zero3": ZERO3, "megatron": MEGATRON}


def _model(element_bytes: int) -> list[ParameterShape]:
    return [ParameterShape(PSI, element_bytes, True, "blocks.0")]


def states_per_parameter(
    strategy: str, ranks: int, precision: PrecisionShape = MIXED, element_bytes: int = 2, tiers: TierShape = NOWHERE
) -> float:
    """Returns the bytes of model states on a rank's device per parameter, under Adam."""
    shape = StrategyShape(THEORIES[strategy])
    return floor_bytes(shape, _model(element_bytes), GroupShape(ranks), ADAM, precision, tiers) / PSI


def volume_per_parameter(strategy: str) -> float:
    """Returns the elements that a rank moves in a step per parameter."""
    return volume_formula(StrategyShape(THEORIES[strategy]), Schedule.sequential(_model(2)), 64).value / PSI


def crossing_per_element(ranks: int, node_size: int, **zeropp: int | bool | None) -> float:
    """Returns the bytes between nodes in a step of ZeRO-3, as between_nodes counts them; without scales."""
    groups = GroupShape(ranks, node_size, **zeropp)  # type: ignore[arg-type]
    schedule = Schedule.sequential(_model(2))
    value = between_nodes_formula(StrategyShape(ZERO3), schedule, groups, MIXED).value
    return value / PSI * ranks / (ranks // node_size - 1) / 2
