"""Shapes that theory needs: a model, its training, and the order of events in a step."""

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
    """One unique parameter, in the module's order. `unit`: its module group in stage 3, or ROOT if it is in none.

    `uses`: the number of places in the module where it is used; more than one means that it is tied. `beside`: the
    index of the parameter whose gradient autograd makes together with this one's: a bias's weight, or a weight's bias.
    For parameters of the root: `reads`, for each place, whether backward there reads the parameter, true if not given;
    `pinned`: it may be read outside its own module, so that the root is kept.
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
    matrix: tuple[int, ...] | None = None
    """Rows and columns, if the optimizer needs the matrix whole: one rank owns it. Of a stack, after its matrices."""

    @property
    def align(self) -> int:
        """Parameters of this kind start, and their shards end, at multiples of this many elements."""
        return math.lcm(ALIGN_BYTES // self.element_bytes, self.block_numel)

    @property
    def cost(self) -> int:
        """Multiplications and additions of a Newton-Schulz iteration: X Xᵀ, its square, and the product with X."""
        short, long = sorted((self.matrix or (0, 0))[-2:])
        return self.matrices * 2 * short * short * (2 * long + short)

    @property
    def matrices(self) -> int:
        """Number of matrices that the optimizer needs whole."""
        return math.prod(self.matrix[:-2]) if self.matrix else 0


@dataclass(frozen=True)
class OptimizerShape:
    """An optimizer. `states`: tensors of the parameter's size that it keeps; `counts`: 4-byte scalars per tensor.
    `fused`: an update needs no temporaries. `element_bytes`: of an element of a state; None: the same as the updated
    tensor's. `block_numel`: elements per 4-byte scale of a state; 1: no scales. `owned`: the same properties for
    matrices that it needs whole.
    """

    states: int
    counts: int
    fused: bool = True
    element_bytes: int | None = None
    block_numel: int = 1
    owned: OptimizerShape | None = None

    @property
    def align(self) -> int:
        """Tensors updated in fp32 are cut at multiples of this many elements."""
        return math.lcm(ALIGN_BYTES // 4, self.block_numel)

    def states_bytes(self, numel: int, master_bytes: int) -> int:
        """Returns the bytes of the states of one tensor of `numel` elements, updated in `master_bytes` each."""
        scales = 4 * -(-numel // self.block_numel) if self.block_numel > 1 else 0
        return self.states * (numel * (self.element_bytes or master_bytes) + scales)

    def bytes_of(self, numel: int, master_bytes: int) -> int:
        """Returns `states_bytes` plus the bytes of the tensor's counts."""
        return self.states_bytes(numel, master_bytes) + 4 * self.counts


@dataclass(frozen=True)
class PrecisionShape:
    """Bytes per element of a gradient, as accumulated and as sent, for a parameter below fp32. Such a parameter has an
    fp32 master; the optimizer gets fp32 gradients in tiles of `tile_bytes`, all together if None, as
    they are if 0. `casts`: gradients are sent in a different dtype from the one they are accumulated in.
    """

    gradient_bytes: int = 4
    wire_bytes: int = 4
    tile_bytes: int | None = 4 * 2**20
    casts: bool = False


@dataclass(frozen=True)
class Schedule:
    """A model's parameters, and one step's order of events.

    `arrivals`: parameters in the order in which their gradients arrive; missing ones are not used. Our engine receives
    the gradient of each use of a tied parameter separately, so that it arrives more than once. `uses`: stage 3 units in
    the order in which forward runs them, with repeats, without the root. `returns`: for each use, whether backward
    reaches it: not if nothing up to there is trained. All of these describe one micro-batch; a step has
    `micro_batches`. `recomputes`: backward runs a unit's forward again when it reaches the unit. `arena`: temporary
    gradients use memory that stays allocated. `by_block`: the backward of a block is one torch.compile graph, which
    makes all gradients of the block before the first is handed over.
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
        """Returns the schedule expected before a run: units as registered, gradients in reverse order."""
        trained = [i for i in reversed(range(len(shapes))) if shapes[i].trainable and shapes[i].numel]
        heads = [i for i in trained for _ in range(shapes[i].uses - 1)]  # tied embeddings are used last, too
        units = tuple(dict.fromkeys(s.unit for s in shapes if s.unit != ROOT))
        before = [{ROOT, *units[: index + 1]} for index in range(len(units))]
        returns = tuple(any(s.trainable for s in shapes if s.unit in names) for names in before)
        return Schedule(tuple(shapes), (*heads, *trained), units, micro_batches, returns)


def optimizer_of(optimizer: OptimizerShape, shape: ParameterShape) -> OptimizerShape:
    """Returns the shape of the optimizer that applies to this parameter."""
    return optimizer.owned if optimizer.owned is not None and shape.matrix is not None else optimizer


def owners_of(shapes: Sequence[ParameterShape], ranks: int) -> dict[int, int]:
    """Returns the rank that owns each matrix: the costliest first, each to the rank with the lowest load so far."""
    loads = [(0, rank) for rank in range(ranks)]
    owners = {}
    matrices = [i for i in trainable(shapes) if shapes[i].matrix]
    for i in sorted(matrices, key=lambda i: (-shapes[i].cost, i)):
        load, owners[i] = heappop(loads)
        heappush(loads, (load + shapes[i].cost, owners[i]))
    return owners


def bytes_of(shape: ParameterShape) -> int:
    """Bytes of the whole parameter."""
    return shape.numel * shape.element_bytes


def trainable(shapes: Sequence[ParameterShape]) -> list[int]:
    """Returns the indices of the trained parameters."""
    return [i for i, s in enumerate(shapes) if s.trainable and s.numel]


def is_half(shape: ParameterShape) -> bool:
    """Whether the parameter has an fp32 master."""
    return shape.element_bytes < 4


def master_bytes(shape: ParameterShape) -> int:
    """Bytes of the tensor that the optimizer updates, and usually of each of its states."""
    return shape.numel * updated_bytes(shape)


def updated_bytes(shape: ParameterShape) -> int:
    """Bytes of an element as the optimizer updates it: fp32, or the parameter's own dtype if wider."""
    return max(4, shape.element_bytes)


def gradient_bytes(shape: ParameterShape, precision: PrecisionShape) -> int:
    """Bytes of an element of the parameter's gradient as it is accumulated."""
    return precision.gradient_bytes if is_half(shape) else shape.element_bytes


def wire_bytes(shape: ParameterShape, precision: PrecisionShape) -> int:
    """Bytes of an element of the parameter's gradient as it is sent; fp64 is never cast."""
    return precision.wire_bytes if is_half(shape) or casts(shape, precision) else shape.element_bytes


def casts(shape: ParameterShape, precision: PrecisionShape) -> bool:
    """Whether the parameter's gradient is sent in a different dtype from the one it is accumulated in."""
    return precision.casts and shape.element_bytes < 8


def micro_batches(schedule: Schedule) -> list[bool]:
    """For each micro-batch that must be played, True for the last one. The fourth is like the third."""
    count = min(schedule.micro_batches, 3)
    return [number == count - 1 for number in range(count)]
