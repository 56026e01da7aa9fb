"""Collectives in groups: two hops through nodes, and shard groups that are replicas of each other.

[Note: slices in nodes]
N ranks form Z nodes of L consecutive ranks. Rank (node z, local rank l) owns slice l·Z + z, so that hops move blocks of
Z slices in place, without a permutation::

    full      | block 0: slices of local rank 0 in node 0, 1 .. Z-1 | block 1: of local rank 1 | ... | block L-1 |

    all_gather        between nodes   block l, by the ranks of local rank l   each sends its slice to Z-1 others
                      within a node   the L blocks                            each sends its block to L-1 others
    reduce_scatter    within a node   own block := sum over the node
                      between nodes   this rank's slice := sum over the nodes

A node thus sends (Z-1)/Z of the buffer to the other nodes, the lower bound; a flat collective sends more.

[Note: replicas]
k consecutive ranks form a shard group, and the N/k groups are replicas (MiCS, arXiv 2205.00119; hybrid sharding,
arXiv 2304.11277, section 3.2.2)::

    all_gather        within the group
    reduce_scatter    within the group; then each rank's slice is summed over the replicas: all-reduce of 1/k

Every replica receives a sum with the same bits, so that all compute the same update.

`connect` chooses the Comm class for a process group by its backend and device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from . import simulated
from .backends import NcclComm, StagedComm
from .base import FAKE, Comm, GroupComm, Handle, Into, Sizes, WrappedComm, backend_for, slice_of
from .gloo import GlooComm
from .out_of_step import hang_watch, watched

KINDS: dict[tuple[str, str], type[GroupComm]] = {
    ("gloo", "cpu"): GlooComm,
    ("gloo", "cuda"): StagedComm,
    ("nccl", "cuda"): NcclComm,
}
"""(backend, device type) -> class."""


def kinds() -> dict[tuple[str, str], type[GroupComm]]:
    """Returns the classes by (backend, device type), including the classes for simulated worlds."""
    return KINDS | {(FAKE, device): kind for device, kind in simulated.KINDS.items()}


def connect(group: dist.ProcessGroup | None, device: torch.device) -> Comm:
    """Returns the Comm of `group`, by default torch's; of one rank without any. Raises ValueError for its backend."""
    if group is None:
        if not dist.is_initialized():
            return Comm()
        group = dist.group.WORLD
    assert group is not None
    if dist.get_rank(group) < 0:
        raise ValueError("group: this rank is not a member of the process group that it was given")
    if dist.get_world_size(group) == 1:
        return Comm()
    backend = backend_for(device.type, group) or str(dist.get_backend(group))
    kind = kinds().get((backend, device.type))
    if kind is None:
        supported = ", ".join(f"{b} on {d}" for b, d in KINDS)
        raise ValueError(f"group: backend {backend!r} on {device.type} is not supported; use one of {supported}")
    return kind(group)


Hop = Callable[[], Handle]


@dataclass(frozen=True)
class Nodes:
    """A rank's two groups. `within`: the ranks of its node. `between`: one rank per node, with its local rank."""

    within: Comm
    between: Comm


class Hops:
    """Collectives of several hops in flight, in launch order, which is the same on all ranks.

    A later hop is launched once the hop before it is done and the program waits for this collective or for a later one.
    So the hops are launched in the same order on all ranks too, and a rank that waits for a collective has launched all
    hops of the collectives before it: no cycle of waits can form.
    """

    def __init__(self) -> None:
        self._in_flight: deque[HopsInFlight] = deque()

    def launch(self, *hops: Hop, finish: Callable[[], None] | None = None) -> Handle:
        """Launches the first hop; `finish` runs after the last."""
        launched = HopsInFlight(self._in_flight, hops)
        self._in_flight.append(launched)
        return Handle([launched], finish)


class HopsInFlight:
    """One collective's hops: the one in flight and those after it. `oldest`: all collectives, until their last hop."""

    def __init__(self, oldest: deque[HopsInFlight], hops: Sequence[Hop]) -> None:
        self._oldest = oldest
        self._handle, self._to_come = hops[0](), deque(hops[1:])

    def wait(self) -> None:
        """Waits for each hop and launches the next, of older collectives first, and waits for the last one."""
        while self in self._oldest:
            older = self._oldest[0]
            while older._to_come:
                older._handle.wait()
                older._handle = older._to_come.popleft()()
            self._oldest.popleft()
        self._handle.wait()


class Hierarchical(WrappedComm):
    """A partition over all ranks, whose gathers and reductions run in two hops. [Note: slices in nodes]"""

    def __init__(self, all_ranks: Comm, nodes: Nodes) -> None:
        super().__init__(all_ranks)
        self.nodes = nodes
        self.hops = Hops()
        self.rank = nodes.within.rank * nodes.between.size + nodes.between.rank

    def reduce_scatter(self, full: torch.Tensor, unit: str = "", into: Into = None, sizes: Sizes = None) -> Handle:
        """Reduces within the node, then between nodes; the block's other slices then hold the node's sums."""
        within, between, block = self.nodes.within, self.nodes.between, self._block(full)
        return self._launch(
            lambda: within.reduce_scatter(full, unit), lambda: between.reduce_scatter(block, unit, into)
        )

    def all_gather(self, full: torch.Tensor, unit: str = "", sizes: Sizes = None) -> Handle:
        within, between, block = self.nodes.within, self.nodes.between, self._block(full)
        return self._launch(lambda: between.all_gather(block, unit), lambda: within.all_gather(full, unit))

    def _block(self, full: torch.Tensor) -> torch.Tensor:
        return slice_of(full, self.nodes.within.rank, self.nodes.within.size, None)

    def _launch(self, first: Hop, second: Hop) -> Handle:
        """Queues both hops immediately on streams, which keep their order; otherwise the second waits for the first."""
        return Handle([first(), second()]) if self.on_streams else self.hops.launch(first, second)


class ShardGroup(WrappedComm):
    """Shard groups. `shards`: ranks of one partition; `replicas`: ranks with the same slice. [Note: replicas]"""

    def __init__(self, all_ranks: Comm, shards: Comm, replicas: Comm) -> None:
        super().__init__(all_ranks)
        self._shards, self._replicas = shards, replicas
        self._hops = Hops()
        self.rank, self.size, self.replica = shards.rank, shards.size, replicas.rank

    def reduce_scatter(self, full: torch.Tensor, unit: str = "", into: Into = None, sizes: Sizes = None) -> Handle:
        own = slice_of(full, self.rank, self.size, None) if into is None else into
        hops: tuple[Hop, Hop] = (
            lambda: self._shards.reduce_scatter(full, unit, into),
            lambda: self._replicas.all_reduce(own, unit),
        )
        return Handle([hop() for hop in hops]) if self.on_streams else self._hops.launch(*hops)

    def all_gather(self, full: torch.Tensor, unit: str = "", sizes: Sizes = None) -> Handle:
        return self._shards.all_gather(full, unit)

    def sum(self, values: torch.Tensor) -> None:
        """Sums only over the shard group: every replica has the same values."""
        self._shards.sum(values)


def connect_groups(
    group: dist.ProcessGroup | None, device: torch.device, node_size: int | None, shard_group: int | None
) -> Comm:
    """Returns the Comm over `group`, in nodes of `node_size` ranks or shard groups of `shard_group`, if not all ranks.
    Collective. Raises ValueError if the ranks cannot be divided in this way.
    """
    all_ranks = connect(group, device)
    if isinstance(all_ranks, GroupComm) and all_ranks.flags_device is None and all_ranks.on_streams:
        if all_ranks.group not in _cpu_groups:
            _cpu_groups[all_ranks.group] = new_cpu_group(all_ranks)
        all_ranks.cpu_group, all_ranks.flags_device = _cpu_groups[all_ranks.group], torch.device("cpu")
        hang_watch(all_ranks.group).groups.add(all_ranks.cpu_group)  # its waits end with the others
    all_ranks = watched(all_ranks)
    check_groups(all_ranks.size, node_size, shard_group)
    if all(size in (None, all_ranks.size) for size in (node_size, shard_group)):
        return all_ranks
    nodes = nodes_of(all_ranks, device, shard_group or node_size or all_ranks.size)
    if shard_group is not None:
        return ShardGroup(all_ranks, nodes.within, nodes.between)
    return all_ranks if node_size == 1 else Hierarchical(all_ranks, nodes)


def check_groups(ranks: int, node_size: int | None, shard_group: int | None) -> None:
    """Raises ValueError for sizes that do not fit together."""
    for name, size, least in (("node_size", node_size, 1), ("shard_group", shard_group, 2)):
        if size is not None and (size < least or ranks % size) and ranks > 1:
            raise ValueError(f"{name}: {size} is invalid; use a divisor of the {ranks} ranks, and at least {least}")
    if node_size is not None and shard_group is not None and node_size != shard_group:
        raise ValueError(
            f"shard_group: {shard_group} ranks with nodes of {node_size}; a group must be a node, so use {node_size}"
        )


def nodes_of(all_ranks: Comm, device: torch.device, node_size: int) -> Nodes:
    """Creates this rank's groups: a node of `node_size` consecutive ranks, and one rank per node. Collective."""
    if all_ranks.group is None or node_size == all_ranks.size:
        return Nodes(all_ranks, Comm())
    if all_ranks.group is not dist.group.WORLD:
        raise ValueError("group: nodes and shard groups are parts of the default process group; leave group out")
    if node_size == 1:
        return Nodes(Comm(), all_ranks)
    nodes = [list(range(first, first + node_size)) for first in range(0, all_ranks.size, node_size)]
    alike = [list(range(local_rank, all_ranks.size, node_size)) for local_rank in range(node_size)]
    within, between = (connect(_own_group(all_ranks.group, parts), device) for parts in (nodes, alike))
    if isinstance(within, NcclComm) and isinstance(between, NcclComm):
        within.share_streams(between)
    return Nodes(watched(within, all_ranks.group), watched(between, all_ranks.group))


_created: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()

_cpu_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def new_cpu_group(comm: Comm) -> dist.ProcessGroup:
    """Returns a new gloo group of the same ranks, which only these create; collective over them.

    torch names such a group after its ranks and the number of groups that each is in (torch-private, tested). If these
    numbers differ, the ranks would wait for each other under different names: groups of one rank make them equal.
    """
    assert comm.group is not None
    names = dist.distributed_c10d._world.pg_names
    device = "cuda" if "nccl" in str(dist.get_backend_config(comm.group)) else "cpu"
    most = torch.tensor([len(names)], dtype=torch.int32, device=device)
    comm.maximum(most)
    while len(names) < most.item():
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    members = dist.get_process_group_ranks(comm.group)
    return dist.new_group(members, backend="gloo", use_local_synchronization=True)


def _own_group(group: dist.ProcessGroup, parts: list[list[int]]) -> dist.ProcessGroup:
    """Returns this rank's group among `parts`; each group is created only once per `group`."""
    created = _created.setdefault(group, {})
    for ranks in map(tuple, parts):
        if ranks not in created:
            created[ranks] = dist.new_group(list(ranks))  # by all ranks, members or not: torch counts the calls
    return next(created[ranks] for ranks in map(tuple, parts) if dist.get_rank() in ranks)
