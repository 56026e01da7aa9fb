"""What groups of ranks and codecs change: who shares a shard, what travels in which hop, what lies beside it meanwhile.

With N ranks in Z nodes of L, a buffer of S bytes and E elements, 1 < L < N, each rank sends of it::

                        within its node       between nodes            volume in elements
    gather, reduction   (L-1)/L · S           (Z-1)/N · S              (1 + 1/L) · E              two hops
    of secondary shards (L-1)/L · S           0                        E                          hpZ
    in int8             the same two of N · payload(E/N)               (1 + 1/L) · its bytes      qwZ
    in int4             (L-1) · payload(E/L)  (Z-1) · payload(E/N)     L and Z payloads' bytes    qgZ

and with shards in groups of k, R = N/k replicas: (k-1)/k · S inside a group for each, and for a reduction
2(R-1)/R · S/k between replicas, 2E/k. A payload is comm/quantize.py's: a byte or half a byte an
element, 4 bytes a block, 8 and padding to 64.
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout import slots_bytes

STAMP_BYTES, PAYLOAD_ALIGN = 8, 64


@dataclass(frozen=True)
class Moved:
    """By one rank: elements, by the paper's convention, and bytes that it sends inside its node and to others."""

    volume: float = 0
    within: float = 0
    between: float = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.volume + other.volume, self.within + other.within, self.between + other.between)

    def times(self, count: int) -> Moved:
        """So many of it."""
        return Moved(count * self.volume, count * self.within, count * self.between)


def payload_bytes(bits: int, numel: int, block: int) -> int:
    """Of a slice of `numel` elements in so many bits each, with a scale a block."""
    values = -(-numel * bits // 8)
    used = -(-values // 4) * 4 + 4 * -(-numel // block) + STAMP_BYTES
    return -(-used // PAYLOAD_ALIGN) * PAYLOAD_ALIGN


@dataclass(frozen=True)
class GroupShape:
    """`node_size`, `shard_group`: None for everybody. `weight_block`, `gradient_block`: None where nothing is coded.
    `secondary`: gathers after a unit's first come from secondary shards in the node.
    """

    world_size: int
    node_size: int | None = None
    shard_group: int | None = None
    weight_block: int | None = None
    gradient_block: int | None = None
    secondary: bool = False

    @property
    def sharers(self) -> int:
        """Ranks that share a shard."""
        return self.shard_group or self.world_size

    @property
    def nodes(self) -> tuple[int, int]:
        """L and Z."""
        node_size = self.node_size or self.world_size
        return node_size, self.world_size // node_size

    def gather(self, numel: int, size: int) -> Moved:
        """Of a unit of `numel` elements of `size` bytes in training."""
        if not self.codes(self.weight_block, size):
            return self.exact_gather(numel, size)
        return self._once(self.world_size * self.payload(numel), 1)

    def exact_gather(self, numel: int, size: int) -> Moved:
        """As it is."""
        return self._once(numel, size)

    def secondary_gather(self, numel: int, size: int) -> Moved:
        """Within a node."""
        inside, _ = self.nodes
        return Moved(numel, (inside - 1) / inside * numel * size) if inside > 1 else Moved()

    def reduction(self, numel: int, size: int) -> Moved:
        """Of a unit's gradients, by a reduce-scatter or what stands for it."""
        if self.codes(self.gradient_block, size):
            first, second = self._hop_payloads(numel)
            inside, outside = self.nodes
            moved = Moved(first, (inside - 1) / inside * first) if inside > 1 else Moved()
            return moved + (Moved(second, 0, (outside - 1) / outside * second) if outside > 1 else Moved())
        if self.sharers == self.world_size:
            return self._once(numel, size)
        replicas, own = self.world_size // self.sharers, numel // self.sharers
        sent = 2 * (replicas - 1) / replicas * own * size
        summed = Moved(2 * own, 0, sent) if self.node_size else Moved(2 * own, sent)
        return self._once(numel, size) + summed

    def all_reduction(self, numel: int, size: int) -> Moved:
        """By an all-reduce over everybody, a ring."""
        sent = 2 * (self.world_size - 1) / self.world_size * numel * size
        crossing = self.nodes[1] / self.world_size if self.nodes[1] > 1 else 0
        return Moved(2 * numel, (1 - crossing) * sent, crossing * sent)

    def _once(self, numel: int, size: int) -> Moved:
        """Every slice goes to every sharer, or the other way round."""
        inside, outside = (self.sharers, 1) if self.shard_group else self.nodes
        moved = Moved(numel, (inside - 1) / inside * numel * size) if inside > 1 else Moved()
        return moved + (Moved(numel // inside, 0, (outside - 1) / outside * numel // inside * size)
                        if outside > 1 else Moved())  # fmt: skip

    # -- what lies beside ---------------------------------------------------------------------------------

    @staticmethod
    def codes(block: int | None, size: int) -> bool:
        """Whether elements of so many bytes are coded; fp64 is not."""
        return block is not None and size < 8

    def payload(self, numel: int) -> int:
        """Bytes of a slice of a unit's parameters as they travel."""
        assert self.weight_block is not None
        return payload_bytes(8, numel // self.world_size, self.weight_block)

    def gather_bytes(self, numel: int, size: int) -> int:
        """Beside the unit itself, until it is there."""
        return self.world_size * self.payload(numel) if self.codes(self.weight_block, size) else 0

    def reduction_bytes(self, numel: int, size: int) -> tuple[int, ...]:
        """Beside what is sent: from the launch on, and then what lies there in turn as it lands."""
        inside, outside = self.nodes
        if self.codes(self.gradient_block, size):
            (first, second), sums = self._hop_payloads(numel), (4 * numel // inside, 4 * numel // self.world_size)
            if inside == 1 or outside == 1:
                only = max(first, second) if inside == 1 else first
                return 2 * only, only + sums[1]
            return 2 * first, first + sums[0], sums[0] + 2 * second, sum(sums) + second
        if self.shard_group or inside == 1 or outside == 1:
            return (slots_bytes(numel * size, self.sharers),)
        return slots_bytes(numel * size, inside), slots_bytes(numel * size // inside, outside)

    def _hop_payloads(self, numel: int) -> tuple[int, int]:
        """Bytes of the payloads of all ranks of a node, and of one in each node; none where one rank is all."""
        assert self.gradient_block is not None
        inside, outside = self.nodes
        first = inside * payload_bytes(4, numel // inside, self.gradient_block) if inside > 1 else 0
        return first, outside * payload_bytes(4, numel // self.world_size, self.gradient_block) if outside > 1 else 0
