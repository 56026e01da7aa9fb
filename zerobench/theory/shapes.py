"""A model, its training and the order of events in a step, as theory sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

ALIGN_BYTES = 64

ROOT = ""
"""The ZeRO-3 unit of parameters in no module group."""


@dataclass(frozen=True)
class ParameterShape:
    """One unique parameter, in the module's order. `unit`: its module group in stage 3, ROOT for the rest.

    `uses`: the number of places in the module where it stands; more than one means that it is tied. `beside`: the
    number of the parameter whose gradient autograd makes at once with this one's: a bias's weight, a weight's bias.
    Of the root's: `reads`, of each place whether the backward there reads the parameter, true where it is not said;
    `pinned`: it may be read outside of its own module, so that the root is kept.
    """

    numel: int
    element_bytes: int
    trainable: bool
    unit: str
    uses: int = 1
    beside: int | None = None
    reads: tuple[bool, ...] = ()
    pinned: bool = False
    block_numel: int = 1
    """Elements whose optimizer states cannot be cut."""
    matrix: tuple[int, int] | None = None
    """Rows and columns, if the optimizer needs the matrix whole: one rank owns it."""

    @property
    def align(self) -> int:
        """Elements at whose multiples parameters of this kind start, and shards end."""
        return math.lcm(ALIGN_BYTES // self.element_bytes, self.block_numel)

    @property
    def cost(self) -> int:
        """Multiplications and additions of an iteration of Newton-Schulz: X Xᵀ, its square, the product with X."""
        short, long = sorted(self.matrix or (0, 0))
        return 2 * short * short * (2 * long + short)


@dataclass(frozen=True)
class OptimizerShape:
    """An optimizer. `states`: tensors of the parameter's size that it keeps; `counts`: 4-byte scalars per tensor.
    `fused`: an update needs no temporaries. `element_bytes`: of an element of a state; None: as many as of what is
    updated. `block_numel`: elements for which a state has a 4-byte scale; 1: none. `owned`: all of these of matrices
    that it needs whole.
    """

    states: int
    counts: int
    fused: bool = True
    element_bytes: int | None = None
    block_numel: int = 1
    owned: OptimizerShape | None = None

    @property
    def align(self) -> int:
        """Elements at whose multiples what is updated in fp32 is cut."""
        return math.lcm(ALIGN_BYTES // 4, self.block_numel)

    def states_bytes(self, numel: int, master_bytes: int) -> int:
        """Returns the bytes of the states of one tensor of `numel` elements, updated in `master_bytes` each."""
        scales = 4 * -(-numel // self.block_numel) if self.block_numel > 1 else 0
        return self.states * (numel * (self.element_bytes or master_bytes) + scales)

    def bytes_of(self, numel: int, master_bytes: int) -> int:
        """Returns these with the tensor's counts."""
        return self.states_bytes(numel, master_bytes) + 4 * self.counts


@dataclass(frozen=True)
class PrecisionShape:
    """Bytes per element of a gradient as it is accumulated and as it is sent, of a parameter below fp32. Such a
    parameter has an fp32 master; `tile_bytes` of fp32 gradients, or all, exist at once as the optimizer is given them.
    `casts`: gradients are sent in another dtype than they are accumulated in.
    """

    gradient_bytes: int = 4
    wire_bytes: int = 4
    tile_bytes: int | None = 4 * 2**20
    casts: bool = False


@dataclass(frozen=True)
class Schedule:
    """A model's parameters, and one step's order of events.

    `arrivals`: parameters in the order in which their gradients come; one that is missing is not used. Our engine is
    handed the gradient of each use of a tied parameter apart, so that it comes more than once.
    `uses`: stage 3 units in the order in which forward runs them, repeats included, the root not. `returns`: of each
    use, whether backward comes to it: not where nothing up to there is trained. All in one micro-batch, of which a step
    has `micro_batches`. `recomputes`: backward runs a unit's forward again when it comes to it. `arena`: gradients that
    come and go have memory that stays. `by_block`: the backward of a block is one graph, of torch.compile, which makes
    all gradients of the block before the first is handed over.
    """

    shapes: tuple[ParameterShape, ...]
    arrivals: tuple[int, ...]
    uses: tuple[str, ...]
    micro_batches: int = 1
    returns: tuple[bool, ...] = ()
    recomputes: bool = False
    arena: bool = False
    by_block: bool = False

    @staticmethod
    def sequential(shapes: Sequence[ParameterShape], micro_batches: int = 1) -> Schedule:
        """Returns the schedule to expect before a run: units as registered, gradients in reverse order."""
        trained = [i for i in reversed(range(len(shapes))) if shapes[i].trainable and shapes[i].numel]
        heads = [i for i in trained for _ in range(shapes[i].uses - 1)]  # tied embeddings are used last, too
        units = tuple(dict.fromkeys(s.unit for s in shapes if s.unit != ROOT))
        before = [{ROOT, *units[: place + 1]} for place in range(len(units))]
        returns = tuple(any(s.trainable for s in shapes if s.unit in names) for names in before)
        return Schedule(tuple(shapes), (*heads, *trained), units, micro_batches, returns)


def optimizer_of(optimizer: OptimizerShape, shape: ParameterShape) -> OptimizerShape:
    """Returns what the optimizer keeps of this parameter."""
    return optimizer.owned if optimizer.owned is not None and shape.matrix is not None else optimizer


def owners_of(shapes: Sequence[ParameterShape], ranks: int) -> dict[int, int]:
    """Returns the rank that owns each matrix: the costliest first, each to the rank with least so far."""
    loads = [(0, rank) for rank in range(ranks)]
    owners = {}
    mine = [i for i in trainable(shapes) if shapes[i].matrix]
    for i in sorted(mine, key=lambda i: (-shapes[i].cost, i)):
        load, owners[i] = heappop(loads)
        heappush(loads, (load + shapes[i].cost, owners[i]))
    return owners


def bytes_of(shape: ParameterShape) -> int:
    """Bytes of the whole parameter."""
    return shape.numel * shape.element_bytes


def trainable(shapes: Sequence[ParameterShape]) -> list[int]:
    """Returns the numbers of the parameters that are trained."""
    return [i for i, s in enumerate(shapes) if s.trainable and s.numel]


def is_half(shape: ParameterShape) -> bool:
    """True if the parameter has an fp32 master."""
    return shape.element_bytes < 4


def master_bytes(shape: ParameterShape) -> int:
    """Bytes of what the optimizer updates, and usually of each of its states."""
    return shape.numel * updated_bytes(shape)


def updated_bytes(shape: ParameterShape) -> int:
    """Bytes of an element as the optimizer updates it: fp32, or the parameter's own dtype above."""
    return max(4, shape.element_bytes)


def gradient_bytes(shape: ParameterShape, precision: PrecisionShape) -> int:
    """Bytes of an element of the parameter's gradient as it is accumulated."""
    return precision.gradient_bytes if is_half(shape) else shape.element_bytes


def wire_bytes(shape: ParameterShape, precision: PrecisionShape) -> int:
    """Bytes of an element of the parameter's gradient as it is sent; fp64 is never cast."""
    return precision.wire_bytes if is_half(shape) or casts(shape, precision) else shape.element_bytes


def casts(shape: ParameterShape, precision: PrecisionShape) -> bool:
    """True if the parameter's gradient is sent in another dtype than it is accumulated in."""
    return precision.casts and shape.element_bytes < 8


def micro_batches(schedule: Schedule) -> list[bool]:
    """For each micro-batch that must be played, True for the last one. The fourth is like the third."""
    count = min(schedule.micro_batches, 3)
    return [number == count - 1 for number in range(count)]
