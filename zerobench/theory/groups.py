"""Traffic and buffers of collectives in groups of ranks, in two hops through nodes, and in quantized form.

ZeRO++, arXiv 2306.10209, section 3; shards in groups as in MiCS, arXiv 2205.00119, section 3.

With N ranks in Z nodes of L, 1 < L < N, each rank sends the following for a buffer of S bytes and E elements::

                        within its node       between nodes            volume in elements
    gather, reduction   (L-1)/L · S           (Z-1)/N · S              (1 + 1/L) · E              two hops
    of secondary shards (L-1)/L · S           0                        E                          hpZ
    in int8             as above with S = N · payload(E/N)             (1 + 1/L) · its bytes      qwZ
    in int4             (L-1) · payload(E/L)  (Z-1) · payload(E/N)     L and Z payloads' bytes    qgZ
    differences         (L-1)/L · S           (Z-1) · payload(E/N)     E + Z payloads' bytes      from secondary shards

With shards in groups of k, and R = N/k replicas: (k-1)/k · S inside a group for either, and for a reduction also
2(R-1)/R · S/k between replicas, volume 2E/k. comm/quantize.py defines a payload: a byte or half a byte an
element, 4 bytes a block, 8 bytes, and padding to 64.

Ranks that share a model send activations: A = b·s·h elements of a block, micro-batch, sequence, width. On n ranks, per
block and micro-batch::

    all-reduces of A    2 forward, 2 backward, 1 in recomputation           2(n-1)/n · A each, volume 2A
    all-gathers of A    1 of its input in parts (P_a)                       (n-1)/n · A, volume A

ZeRO, section 8, counts 2 all-reduces in the recomputation of a block: its volume is 12A, and P_a adds 1/12. The second
makes the next block's input, which is kept, so recomputation ends before it: the volume is 10A, and P_a adds 1/10.

Rank r owns slice (r mod L) · Z + r div L of every partitioned buffer if collectives take hops through nodes, slice
r mod k if k ranks share a shard, else slice r (comm/hierarchical.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout import slots_bytes

RESERVED_BYTES, PAYLOAD_ALIGN = 8, 64


@dataclass(frozen=True)
class Moved:
    """Traffic of one rank: elements by the paper's convention, and bytes sent within its node and to other nodes."""

    volume: float = 0
    within: float = 0
    between: float = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.volume + other.volume, self.within + other.within, self.between + other.between)

    def times(self, count: int) -> Moved:
        """Returns the traffic of `count` such operations."""
        return Moved(count * self.volume, count * self.within, count * self.between)


def payload_bytes(bits: int, numel: int, block: int) -> int:
    """Returns the bytes of `numel` elements of `bits` each as they are sent, with a scale per `block` elements."""
    values = -(-numel * bits // 8)
    used = -(-values // 4) * 4 + 4 * -(-numel // block) + RESERVED_BYTES
    return -(-used // PAYLOAD_ALIGN) * PAYLOAD_ALIGN


@dataclass(frozen=True)
class GroupShape:
    """Groups of ranks, and quantization. `node_size`, `shard_group`: None for all ranks. `weight_block`,
    `gradient_block`, `difference_block`: elements per scale, None if nothing is quantized. `secondary`: gathers after a
    unit's first come from secondary shards within the node (hpZ). `bits_within`: bits of gradients within a node.
    `on_gpu`: reductions need no receive slots, and copies to host memory are asynchronous.
    """

    world_size: int
    node_size: int | None = None
    shard_group: int | None = None
    weight_block: int | None = None
    gradient_block: int | None = None
    secondary: bool = False
    difference_block: int | None = None
    bits_within: int = 4
    on_gpu: bool = False

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that a state is divided among."""
        return self.shard_group or self.world_size

    @property
    def nodes(self) -> tuple[int, int]:
        """(L, Z): ranks per node, and nodes."""
        node_size = self.node_size or self.world_size
        return node_size, self.world_size // node_size

    def gather(self, numel: int, size: int) -> Moved:
        """Traffic of an all-gather of `numel` elements of `size` bytes, quantized if configured."""
        if not self.quantizes(self.weight_block, size):
            return self.exact_gather(numel, size)
        return self.exact_gather(self.world_size * self.payload(numel), 1)

    def first_gather(self, numel: int, size: int) -> Moved:
        """Traffic of a unit's first all-gather after an update: of differences, if configured."""
        if not self.quantizes(self.difference_block, size):
            return self.gather(numel, size)
        sent, nodes = self.difference_bytes(numel, size), self.nodes[1]
        return self.secondary_gather(numel, size) + Moved(sent, 0, (nodes - 1) / nodes * sent)

    def exact_gather(self, numel: int, size: int) -> Moved:
        """Traffic of an all-gather that is never quantized, in one hop or two; a reduce-scatter sends the same."""
        inside, outside = (self.shard_ranks, 1) if self.shard_group else self.nodes
        moved = Moved(numel, (inside - 1) / inside * numel * size) if inside > 1 else Moved()
        if outside > 1:
            moved += Moved(numel // inside, 0, (outside - 1) / outside * numel // inside * size)
        return moved

    def owned_gather(self, own: int, size: int) -> Moved:
        """Traffic of the rank that owns `own` elements of a unit of matrices and sends them to every other rank."""
        return Moved(self.world_size * own, (self.world_size - 1) * own * size)

    def owned_reduction(self, others: int, size: int) -> Moved:
        """Traffic of a rank that sends each other rank the elements which that rank owns."""
        return Moved(others * self.world_size / (self.world_size - 1), others * size)

    def secondary_gather(self, numel: int, size: int) -> Moved:
        """Traffic of an all-gather of secondary shards, within a node."""
        inside, _ = self.nodes
        return Moved(numel, (inside - 1) / inside * numel * size) if inside > 1 else Moved()

    def reduction(self, numel: int, size: int) -> Moved:
        """Traffic of a reduce-scatter of gradients, or of the all-to-alls that replace it."""
        if self.quantizes(self.gradient_block, size):
            first, second = self._hop_payloads(numel)
            inside, outside = self.nodes  # a hop of one has no payload
            return Moved(first + second, (inside - 1) / inside * first, (outside - 1) / outside * second)
        if self.shard_ranks == self.world_size:
            return self.exact_gather(numel, size)
        replicas, own = self.world_size // self.shard_ranks, numel // self.shard_ranks
        sent = 2 * (replicas - 1) / replicas * own * size
        summed = Moved(2 * own, 0, sent) if self.node_size else Moved(2 * own, sent)
        return self.exact_gather(numel, size) + summed

    def all_reduction(self, numel: int, size: int) -> Moved:
        """Traffic of a ring all-reduce over all ranks."""
        sent = 2 * (self.world_size - 1) / self.world_size * numel * size
        crossing = self.nodes[1] / self.world_size if self.nodes[1] > 1 else 0
        return Moved(2 * numel, (1 - crossing) * sent, crossing * sent)

    # -- buffers ---------------------------------------------------------------------------------

    @staticmethod
    def quantizes(block: int | None, size: int) -> bool:
        """Whether elements of `size` bytes are quantized; fp64 never is."""
        return block is not None and size < 8

    def payload(self, numel: int) -> int:
        """Bytes of one rank's slice of quantized parameters as they are sent."""
        assert self.weight_block is not None
        return payload_bytes(8, numel // self.world_size, self.weight_block)

    def gather_bytes(self, numel: int, size: int) -> int:
        """Bytes of a unit's quantized form, which exists alongside the unit until it is gathered."""
        return self.world_size * self.payload(numel) if self.quantizes(self.weight_block, size) else 0

    def difference_bytes(self, numel: int, size: int) -> int:
        """Bytes of a unit's differences that ranks with the same local rank gather; 0 if differences are not sent."""
        if not self.quantizes(self.difference_block, size):
            return 0
        assert self.difference_block is not None
        return self.nodes[1] * payload_bytes(4, numel // self.world_size, self.difference_block)

    def reduction_bytes(self, numel: int, size: int, own: int | None = None) -> tuple[int, ...]:
        """Bytes of receive buffers, in addition to the send buffer: at the launch, then in turn as the reduction
        completes. `own`: elements of this rank's slice of owned matrices, for which groups do not apply.
        """
        if own is not None:
            return (self._slots(numel * size, self.shard_ranks, own * size),)
        inside, outside = self.nodes
        if self.quantizes(self.gradient_block, size):
            (first, second), sums = self._hop_payloads(numel), (4 * numel // inside, 4 * numel // self.world_size)
            if inside == 1 or outside == 1:
                only = max(first, second) if inside == 1 else first
                return 2 * only, only + sums[1]
            return 2 * first, first + sums[0], sums[0] + 2 * second, sum(sums) + second
        if self.shard_group or inside == 1 or outside == 1:
            return (self._slots(numel * size, self.shard_ranks),)
        return self._slots(numel * size, inside), self._slots(numel * size // inside, outside)

    def _slots(self, padded_bytes: int, ranks: int, own_bytes: int | None = None) -> int:
        return 0 if self.on_gpu else slots_bytes(padded_bytes, ranks, own_bytes)

    def _hop_payloads(self, numel: int) -> tuple[int, int]:
        """Bytes of quantized gradients in the hop within a node and the hop between nodes; 0 for a hop of one."""
        assert self.gradient_block is not None
        inside, outside = self.nodes
        first = inside * payload_bytes(self.bits_within, numel // inside, self.gradient_block) if inside > 1 else 0
        return first, outside * payload_bytes(4, numel // self.world_size, self.gradient_block) if outside > 1 else 0


def slice_of(rank: int, groups: GroupShape) -> int:
    """Returns the index of the slice of every partitioned buffer that a rank owns."""
    if groups.shard_group:
        return rank % groups.shard_group
    node_size, nodes = groups.nodes
    return rank % node_size * nodes + rank // node_size


def tensor_parallel_bytes(
    ranks: int, blocks: int, activation_bytes: int, recomputes: bool, partitions: bool, micro_batches: int
) -> dict[str, int]:
    """Returns collective -> bytes that a rank sends in a step to the ranks that share its model. `activation_bytes`: of
    A; `recomputes`: each block in backward; `partitions`: from a partitioned input (P_a).
    """
    counts = {"all_reduce": 2 * (4 + recomputes), "all_gather": int(partitions)}
    each = activation_bytes * micro_batches * blocks
    return {name: each * count * (ranks - 1) // ranks for name, count in counts.items()}
