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

from zerobench.config.cell import CellConfig
from zerobench.config.combinations import activation_policy
from zerobench.config.compose import compose_cells
from zerobench.config.schema import Gpt
from zerobench.predict.flops import step_flops
from zerobench.records import STATES
from zerobench.sections import known
from zerobench.simulation.execute import CPU, Execution, Target
from zerobench.theory.closed_forms import between_nodes_formula, floor_bytes, volume_formula
from zerobench.theory.groups import GroupShape
from zerobench.theory.shapes import NOWHERE, OptimizerShape, ParameterShape, PrecisionShape, Schedule, TierShape
from zerobench.theory.strategy import DDP, MEGATRON, ZERO1, ZERO2, ZERO3, StrategyShape

from ..runner import Work, execute_cells

Parts = dict[str, float]
"""Bytes, elements or FLOPs by what they are of; a quantity is their sum."""

LAYERS = ("model.layers=2", "model.layers=4")

GPT = "model=gpt model.hidden=1024 model.heads=8 model.vocabulary=1024 data=synthetic backend=simulated"
"""Words that the cells of many rows begin with. Slopes do not depend on the shape, so that it is small."""

BF16 = f"{GPT} precision=bf16"

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


def reproduce(
    rows: Sequence[tuple[str, PublishedFigure]], execute: Callable[[Sequence[Work]], Sequence[Execution]] | None = None
) -> list[Reproduced]:
    """Executes all cells of (source, row) pairs, each once, and returns the rows with their values, in order."""
    cells = list(dict.fromkeys((row.target, words) for _, row in rows for words in row.cells))
    work = [(compose_cells(words.split(), target=target.kind)[0].config, target) for target, words in cells]
    found = execute(work) if execute else execute_cells("published", work)
    executed = dict(zip(cells, found, strict=True))
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
    rows = [row for row in one.result.memory if row.phase == "step" and row.tier == "device"]
    return {row.category: float(row.at_states_peak_bytes or 0) for row in rows if row.category in STATES}


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


def layer_of_gpt(heads: int, hidden: int, recomputed: bool = False) -> float:
    """Returns the bytes of a layer of our GPT in half precision that forward keeps, over sbh."""
    shape = GptShape(1, hidden, heads, 1, 128, 1, 2, recomputed)
    return 2.0 if recomputed else layer_bytes(shape) / (shape.tokens * hidden)


# -- bytes of a GPT's activations ------------------------------------------------------------------


@dataclass(frozen=True)
class GptShape:
    """A GPT and its batch. `micro_batch`: sequences on a rank in one forward; `element_bytes`: of the model's dtype.
    `offload`: what layers keep waits in host memory, storages of `least_bytes` and more.

    Korthikanti et al., Reducing Activation Recomputation, arXiv 2205.05198, section 4. With s tokens, b sequences, h
    hidden, a heads, L layers, V vocabulary, and e bytes an element (the paper's 2)::

        a layer, in the paper        sbh (34 + 5as/h)       equation 1, e = 2, with dropout and a materialized softmax
        less two dropout masks       - 2sbh                 our GPT has none
        less 5as/h                                          a fused attention kernel keeps 4asb bytes in its place
        so, in e bytes an element    16 e sbh + 4asb

        recomputed                   e sbh a layer; and while backward is in a layer that one as above, with the
                                     gradients inside its MLP, 4 e sbh                                  section 5
        in host memory               what is offloaded, of all layers but the last: storages of `least_bytes` and
                                     more, 16 e sbh a layer; recomputed e sbh
        offloaded, on the device     the last layer and, while backward is in it, the one before; 5 e sbh of gradients
        where backward begins        2 e sbh for the last norm and the head, and 12 sbV: the logits' logarithms in fp32
                                     and two gradients of them at once (section 4.3 counts the first)
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    micro_batch: int
    element_bytes: int
    checkpointing: bool
    offload: bool = False
    least_bytes: int = 64 * 1024

    @property
    def tokens(self) -> int:
        """Tokens of one forward on one rank."""
        return self.sequence * self.micro_batch


def layer_bytes(shape: GptShape) -> int:
    """Bytes that forward keeps of one layer for the backward."""
    return sum(_storages(shape))


def _storages(shape: GptShape) -> list[int]:
    """Bytes of each storage that a layer keeps: inputs and outputs of two norms, the output of attention, its three
    inputs in one, its log-sum-exp in fp32, and the activation function's input and output.
    """
    stream = shape.element_bytes * shape.tokens * shape.hidden
    return [*[stream] * 5, 3 * stream, 4 * shape.heads * shape.tokens, 4 * stream, 4 * stream]


def activation_bytes(shape: GptShape) -> int:
    """Returns the largest sum of activations and of their gradients on the device: where backward begins, or while it
    is in a layer that is recomputed, or in the last one while the one before comes back.
    """
    stream, layer = shape.element_bytes * shape.tokens * shape.hidden, layer_bytes(shape)
    kept = _storages(shape)[:1] if shape.checkpointing else _storages(shape)
    moved = sum(size for size in kept if size >= shape.least_bytes) if shape.offload else 0
    at_the_end = 2 * stream + 12 * shape.tokens * shape.vocabulary
    coming = moved * (shape.layers > 1)
    if shape.checkpointing:
        inputs = shape.layers * (stream - moved)
        return inputs + moved + max(at_the_end, layer + 4 * stream + coming)
    if not shape.offload:
        return shape.layers * layer + at_the_end
    return shape.layers * (layer - moved) + moved + max(at_the_end, coming + 5 * stream)


def shape_of(config: CellConfig) -> GptShape:
    model, policy = config.model, activation_policy(config)
    assert isinstance(model, Gpt)
    return GptShape(
        model.layers, model.hidden, model.heads, known(model.vocabulary), config.sequence, config.micro_batch,
        config.precision.dtype.itemsize, model.checkpointing or policy.recompute, policy.keep == "host",
        policy.least_bytes,
    )  # fmt: skip
