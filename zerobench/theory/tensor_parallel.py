"""Traffic of tensor parallelism: bytes that a rank sends in a step to the ranks that share its model.

A block's activations are A = b·s·h elements: micro-batch, sequence, width. On n ranks, per block and micro-batch::

    all-reduces of A    2 forward, 2 backward, 1 in recomputation           2(n-1)/n · A each, volume 2A
    all-gathers of A    1 of its input in parts (P_a)                       (n-1)/n · A, volume A

ZeRO, arXiv 1910.02054, section 8, counts 2 all-reduces in the recomputation of a block: its volume is 12A, and P_a adds
1/12. The second all-reduce makes the next block's input, which is kept, so recomputation ends before it: the volume is
10A, and P_a adds 1/10.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorParallelShape:
    """`ranks` that share a model of `blocks`. `numel`, `element_bytes`: of a block's activations, A. `recomputes`: each
    block is recomputed in backward; `partitions`: from a partitioned input (P_a).
    """

    ranks: int
    blocks: int
    numel: int
    element_bytes: int
    recomputes: bool = False
    partitions: bool = False

    def predict(self, micro_batches: int) -> dict[str, int]:
        """Returns collective -> bytes that a rank sends in a step."""
        counts = {"all_reduce": 2 * (4 + self.recomputes), "all_gather": int(self.partitions)}
        each = self.numel * self.element_bytes * micro_batches * self.blocks
        return {name: each * count * (self.ranks - 1) // self.ranks for name, count in counts.items()}
