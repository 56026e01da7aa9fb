"""Which slice of every partitioned buffer a rank owns.

Rank r of Z nodes of L owns slice (r mod L) · Z + r div L where collectives take hops through nodes, slice r mod k where
k ranks share a shard, else slice r (comm/hierarchical.py).
"""

from __future__ import annotations

from .groups import GroupShape


def slice_of(rank: int, groups: GroupShape) -> int:
    """Returns the number of the slice that a rank owns of every partitioned buffer."""
    if groups.shard_group:
        return rank % groups.shard_group
    node_size, nodes = groups.nodes
    return rank % node_size * nodes + rank // node_size
