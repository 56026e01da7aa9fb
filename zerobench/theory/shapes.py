"""Shapes that theory needs: a model, its training, the order of events in a step, and the states that leave the device.

States that leave, and the traffic that this causes, by closed form: ZeRO-Offload, arXiv 2101.06840, section 3 and table
1; ZeRO-Infinity, arXiv 2104.07857, section 3. In half precision with Adam, bytes per parameter on the device, without
whole gradients::

    nothing leaves                 16 (zero1 at N = 1)        with N ranks      see closed_forms.py
    gradients                      14                                           minus 2/N
    optimizer                       4                                           minus 12/N
    both                            2 (zero1, zero2)                            2/N and units in use (zero3)

Over a step and all ranks, with r reductions and g gathers of each ZeRO-3 unit::

    down       r · 2ψ if gradients leave; 2ψ if they stay and the optimizer leaves
    up         2ψ parameters of offloaded optimizers; 2ψ gradients if only they leave; g · 2ψ for offloaded shards
    read       12ψ masters and states, 2ψ gradients, g · 2ψ parameters
    write      12ψ, r · 2ψ, 2ψ

To the byte, with padding and repeated reads: replay/traffic.py.
"""

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
    """Rows and columns, if the optimizer needs the whole matrix, which one rank owns; a stack's size comes first."""

    @property
    def align(self) -> int:
        """Parameters of this kind start, and their shards end, at multiples of this many elements."""
        return math.lcm(ALIGN_BYTES // self.element_bytes, self.block_numel)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.numel * self.element_bytes

    @property
    def is_half(self) -> bool:
        """Whether it has an fp32 master."""
        return self.element_bytes < 4

    @property
    def updated_bytes(self) -> int:
        """Bytes of an element as the optimizer updates it: fp32, or the parameter's own dtype if wider."""
        return max(4, self.element_bytes)

    @property
    def master_bytes(self) -> int:
        """Bytes of the tensor that the optimizer updates, and usually of each of its states."""
        return self.numel * self.updated_bytes

    def gradient_bytes(self, precision: PrecisionShape) -> int:
        """Bytes of an element of its gradient as it is accumulated."""
        return precision.gradient_bytes if self.is_half else self.element_bytes

    def wire_bytes(self, precision: PrecisionShape) -> int:
        """Bytes of an element of its gradient as it is sent; fp64 is never cast."""
        return precision.wire_bytes if self.is_half or self.casts(precision) else self.element_bytes

    def casts(self, precision: PrecisionShape) -> bool:
        """Whether its gradient is sent in a different dtype from the one it is accumulated in."""
        return precision.casts and self.element_bytes < 8

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

    def of(self, is_matrix: bool) -> OptimizerShape:
        """Returns the properties that apply to a matrix needed whole, or to another parameter."""
        return (self.owned if is_matrix else None) or self


@dataclass(frozen=True)
class PrecisionShape:
    """Bytes per element of a gradient, as accumulated and as sent, for a parameter below fp32. Such a parameter has an
    fp32 master; the optimizer gets fp32 gradients in tiles of `tile_bytes`; None: all in one tile;
    0: no cast. `casts`: gradients are sent in a different dtype from the one they are accumulated in.
    """

    gradient_bytes: int = 4
    wire_bytes: int = 4
    tile_bytes: int | None = 4 * 2**20
    casts: bool = False


FULL = PrecisionShape()
"""fp32."""


@dataclass(frozen=True)
class Schedule:
    """A model's parameters, and one step's order of events.

    `arrivals`: parameters in the order in which their gradients arrive; missing ones are not used. Our engine receives
    the gradient of each use of a tied parameter separately, so that it arrives more than once. `uses`: stage 3 units in
    the order in which forward runs them, with repeats, without the root. `returns`: for each use, whether backward
    reaches it: not if nothing up to there is trained. All of these describe one micro-batch; a step has
    `micro_batches`. `recomputes`: backward runs a unit's forward again when it reaches the unit. `arena`: temporary
    gradients use memory that stays allocated. `by_block`: the backward of a block is one torch.compile graph, which
    makes all gradients of the block before the first is handed over. `head_is_loss`: the head computes the loss in
    parts, so that backward of the model begins with it.
    """

    shapes: tuple[ParameterShape, ...]
    arrivals: tuple[int, ...]
    uses: tuple[str, ...]
    micro_batches: int = 1
    returns: tuple[bool, ...] = ()
    recomputes: bool = False
    arena: bool = False
    by_block: bool = False
    head_is_loss: bool = False

    @staticmethod
    def sequential(shapes: Sequence[ParameterShape], micro_batches: int = 1) -> Schedule:
        """Returns the schedule expected before a run: units as registered, gradients in reverse order."""
        trained = [i for i in reversed(range(len(shapes))) if shapes[i].trainable and shapes[i].numel]
        heads = [i for i in trained for _ in range(shapes[i].uses - 1)]  # tied embeddings are used last, too
        units = tuple(dict.fromkeys(s.unit for s in shapes if s.unit != ROOT))
        before = [{ROOT, *units[: index + 1]} for index in range(len(units))]
        returns = tuple(any(s.trainable for s in shapes if s.unit in names) for names in before)
        return Schedule(tuple(shapes), (*heads, *trained), units, micro_batches, returns)

    @property
    def played(self) -> list[bool]:
        """For each micro-batch that is played: is it the last? At most three, as a fourth would be like the third."""
        count = min(self.micro_batches, 3)
        return [number == count - 1 for number in range(count)]


def owners_of(shapes: Sequence[ParameterShape], ranks: int) -> dict[int, int]:
    """Returns the rank that owns each matrix: the costliest first, each to the rank with the lowest load so far."""
    loads = [(0, rank) for rank in range(ranks)]
    owners = {}
    matrices = [i for i in trainable(shapes) if shapes[i].matrix]
    for i in sorted(matrices, key=lambda i: (-shapes[i].cost, i)):
        load, owners[i] = heappop(loads)
        heappush(loads, (load + shapes[i].cost, owners[i]))
    return owners


def trainable(shapes: Sequence[ParameterShape]) -> list[int]:
    """Returns the indices of the trained parameters."""
    return [i for i, s in enumerate(shapes) if s.trainable and s.numel]


# -- tiers -----------------------------------------------------------------------------------------


STAGING_NUMEL, STAGING = 2**20, 2
"""Elements of a buffer through which half-precision parameters go up, and the number of these buffers."""

POOL_ALIGN_BYTES = 4096


@dataclass(frozen=True)
class TierShape:
    """An offload. `medium`: host or nvme, None if nothing leaves; the other fields are those of a config's offload. By
    default files are read and written past the page cache.
    """

    medium: str | None = None
    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False
    fraction: float = 1.0
    delayed: bool = False
    block_bytes: int = 0
    buffers: int = 0
    direct: bool = True

    def _leaving(self, shard_numel: int, align: int) -> int:
        """Returns how many of a shard's first elements leave: a fraction, rounded up to a multiple of `align`."""
        part = math.ceil(shard_numel * self.fraction)
        return min(shard_numel, -(-part // align) * align)

    def updated_on_host(self, shard_numel: int, align: int) -> int:
        """Returns how many elements of a shard are updated on the host, the first ones."""
        return self._leaving(shard_numel, align) if self.optimizer else 0

    def gradients_on_host(self, shard_numel: int, align: int) -> int:
        """Returns how many elements of a shard have gradients that leave as they are reduced."""
        return self._leaving(shard_numel, align) if self.gradients else 0

    @property
    def chunk_numel(self) -> int | None:
        """Elements of a shard that are read, updated and written together; None without files."""
        return self.block_bytes // 4 if self.medium == "nvme" else None

    @property
    def pool_bytes(self) -> int:
        """Bytes of the buffers in host memory through which files are read and written."""
        block = -(-self.block_bytes // POOL_ALIGN_BYTES) * POOL_ALIGN_BYTES
        return block * self.buffers + POOL_ALIGN_BYTES if self.medium == "nvme" else 0


NOWHERE = TierShape()
