"""The interface for all communication between ranks: a stage asks for a collective, a backend runs it.

A full buffer has `N · shard_numel` elements; slice j belongs to rank j. With `sizes` slice j has sizes[j] elements,
possibly none. The collectives work in place:

    reduce_scatter(full)   this rank's slice := sum over ranks of it      (other slices: unchanged; with `into` the sum
                           goes there, and the content of this rank's slice is undefined)
    all_gather(full)       slice j := rank j's slice j, for every j       (this rank's slice: must be filled before)
    all_reduce(full)       every slice := sum over ranks of that slice
    all_to_all(to, here)   slice j of `here` := rank j's slice for this rank, for every other j

Collectives *pair* when the backend matches one rank's launch with another's. NCCL matches by order; a backend with
`pairs_by_unit` matches reductions and gathers by the name of their unit.

The backends: comm/backends.py. Groups of ranks: comm/hierarchical.py. Ranks that launch different collectives:
comm/out_of_step.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from .. import labels

T = TypeVar("T")

Into = torch.Tensor | None
"""The destination of a sum; None: this rank's slice of the full buffer."""

Sizes = Sequence[int] | None
"""Elements of each rank's slice of a full buffer, if they differ (layout.py [Note: owned]); None: all are equal."""


FAKE = "fake"
"""torch's name for a process group that sends nothing (torch-private, tested): a simulated world."""


TREE_FROM = 16
"""Ranks from which on flags are gathered on rank 0 and sent from there: gloo's all-reduce is a ring, 2 (N - 1) messages
that wait for one another, and its broadcast a tree.
"""

FAULT = 2**30
"""A first flag at or above this is a fault; every flag with its checksum is below."""


Collective = Callable[..., Any]
"""A callable that takes `async_op`, as the collectives of torch.distributed do."""


class Waitable(Protocol):
    """A launched collective."""

    def wait(self) -> object:
        """Makes later work of the current stream (on a CPU: the caller) wait until the collective is done."""


class Launcher(Protocol):
    """Starts collectives: in a backend's own threads, or on a stream (comm/backends.py)."""

    def launch(self, collective: Collective) -> Waitable:
        """Starts `collective`."""


class Threads:
    """A process group whose own threads transfer the bytes, as in gloo: no stream is needed."""

    def launch(self, collective: Collective) -> Waitable:
        """Starts `collective`."""
        work: Waitable = collective(async_op=True)
        return work


class Handle:
    """A collective in flight. `wait` completes it and releases every tensor that it kept alive. `works`: awaited in
    order, other handles if it has several hops. `finish`: called after them. `operation`: its number among the logical
    collectives (labels.collective); None for one of several hops.
    """

    watch: AbstractContextManager[object] = nullcontext()
    """The context in which it is waited for (out_of_step.py)."""

    def __init__(
        self, works: Sequence[Waitable], finish: Callable[[], object] | None = None, operation: int | None = None
    ) -> None:
        self._works, self._finish, self._operation = works, finish, operation

    def wait(self) -> None:
        """Blocks (on CUDA: the current stream) until the collective is done. A second call does nothing."""
        works, finish, operation = self._works, self._finish, self._operation
        self._works, self._finish, self._operation = (), None, None
        with self.watch:
            for work in works:
                work.wait()
            if finish is not None:
                finish()
            if operation is not None:
                labels.waited(operation)


class NamedEngine(Protocol):
    """What error messages about collectives need to know of an engine."""

    steps: int

    def names_in(self, unit: str) -> list[str]:
        """Names the parameters of a unit."""


class Launches:
    """Counts the collectives that an engine launches, and compares them across ranks before an update. This base class
    does neither: it is for a world of one rank and for a simulated world, in which no rank can launch different ones.
    ComparedLaunches (out_of_step.py) does.
    """

    def register(self, engine: NamedEngine) -> None:
        """Registers the engine, so that error messages can name its units and steps."""

    def add(self, kind: str, unit: str) -> None:
        """Counts a collective of a unit, a "gather" or a "reduction"; the hops that it takes are not counted."""

    def agree(self, comm: Comm, flags: torch.Tensor, sent: torch.Tensor, what: str) -> list[int]:
        """Returns the maximum over the ranks of `flags`, (n,) int32 of 0 and 1 on the host, before an update.

        `sent`: a tensor like it, from which they are sent. `what`: the operation, which must be equal on all ranks.
        Raises RuntimeError if it is not, or if the ranks launched different collectives before it. The first flag may
        be FAULT plus a number, with which a rank tells all others that it cannot go on: then nothing else is compared.
        """
        sent.copy_(flags)
        comm.maximum(sent)
        return sent.tolist()


class Comm:
    """Collectives of a world of one rank, which send nothing; the base class of the backends. `full`: (N ·
    shard_numel,). `unit`: the unit's name, equal on all ranks.
    """

    rank = 0
    size = 1
    """Number of ranks in the shard group; a buffer has this many slices, of which this rank owns number `rank`."""
    averaged_ranks = 1
    """Number of ranks that gradients are averaged over: more than `size` if shard groups are replicas of each other."""
    replica = 0
    """Number of the replica that this rank's slices belong to."""
    group: dist.ProcessGroup | None = None
    """Process group of all ranks."""
    flags_device: torch.device | None = None
    """Device for flags that the host reads, chosen so that no GPU is synchronized; None: the model's device."""
    pairs_by_unit = False
    """True if slices of different units never pair; otherwise collectives pair in the order in which they start."""
    launches = Launches()
    on_streams = False
    """True if collectives run on their own CUDA streams, concurrently with the compute stream: comm/backends.py."""

    def reduce_scatter(self, full: torch.Tensor, unit: str = "", into: Into = None, sizes: Sizes = None) -> Handle:
        """Sums `full` over the ranks into this rank's slice, or `into` another tensor of its shape and dtype."""
        return Handle([])

    def all_gather(self, full: torch.Tensor, unit: str = "", sizes: Sizes = None) -> Handle:
        """Fills every slice of `full` from its owner."""
        return Handle([])

    def all_reduce(self, full: torch.Tensor, unit: str = "") -> Handle:
        """Sums `full` over the ranks, at twice the volume of a reduce-scatter."""
        return Handle([])

    def all_to_all(self, to: torch.Tensor, here: torch.Tensor, name: str, unit: str = "") -> Handle:
        """Sends slice j of `to` to rank j and receives slice j of `here` from it, both (N · m,), except this rank's.
        `name`: the logical collective.
        """
        return Handle([])

    @property
    def is_first(self) -> bool:
        """True on the rank whose initial values are broadcast to all others."""
        return self.rank == self.replica == 0

    @property
    def exact(self) -> Comm:
        """Lossless collectives: this object itself, or the one below a quantizing codec."""
        return self

    def new_source(self, sizes: Sizes = None) -> Source:
        """Returns the source from which a unit of stage 3, with slices of these `sizes`, fills its full parameters."""
        return Source(self, sizes)

    def forget(self) -> None:
        """Drops the state of earlier exchanges, because other weights are loaded."""

    def put_aside(self) -> Callable[[], None]:
        """Copies the state of earlier exchanges, before a swap of weights. Returns the function that restores it."""
        return self.forget

    def meet(self, what: str) -> None:
        """Returns when all ranks have called it: a barrier before a small collective that could pair with another."""

    def call(self, channel: str, run: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
        """Runs a collective of all ranks that blocks until it is done, and returns its result. `channel`: a name for
        it. `group`: the process group that it uses, by default this one's.
        """
        return run()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copies rank 0's `tensor` to every rank; control traffic, not part of the volume (start-up, buffers)."""

    def maximum(self, flags: torch.Tensor) -> None:
        """Takes the elementwise maximum over the ranks, in place; control traffic."""

    def sum(self, values: torch.Tensor) -> None:
        """Sums elementwise over the ranks, in place; control traffic, such as the few float64 values of a norm."""


class GroupComm(Comm):
    """The part of a backend that is common to all process groups."""

    exchange_into: Callable[..., Any] = staticmethod(dist.all_to_all_single)
    group: dist.ProcessGroup
    cpu_group: dist.ProcessGroup
    """The process group for flags on the host: `group`, if it has a CPU backend, or another one of the same ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = self.cpu_group = group
        self.rank = dist.get_rank(group)
        self.size = self.averaged_ranks = dist.get_world_size(group)
        self._reductions: Launcher = Threads()
        self._gathers: Launcher = Threads()
        self._sent: torch.Tensor | None = None
        """The last control values, kept so that they are freed at the same point in every run and peaks repeat:
        gloo's thread releases its reference only a moment after it reports completion."""
        if backend_for("cpu", group):
            self.flags_device = torch.device("cpu")

    def all_reduce(self, full: torch.Tensor, unit: str = "") -> Handle:
        with labels.collective("all_reduce", unit) as operation:
            work = self._reductions.launch(partial(dist.all_reduce, full, group=self.group))
        return Handle([work], operation=operation)

    def all_to_all(self, to: torch.Tensor, here: torch.Tensor, name: str, unit: str = "") -> Handle:
        with labels.collective(name, unit) as operation:
            works = self._exchange(to, here, unit)
        return Handle(works, operation=operation)

    def _exchange(self, to: torch.Tensor, here: torch.Tensor, unit: str) -> list[Waitable]:
        return [self._reductions.launch(partial(self.exchange_into, here, to, group=self.group))]

    def broadcast(self, tensor: torch.Tensor) -> None:
        dense = tensor.contiguous()  # gloo sends the memory, whatever the strides say, and not of every dtype
        with labels.collective("control", labels.BUFFERS):
            dist.broadcast(dense.flatten().view(torch.uint8), group_src=0, group=self.group)
        if dense is not tensor:
            tensor.copy_(dense)

    def maximum(self, flags: torch.Tensor) -> None:
        group = self.group if flags.is_cuda else self.cpu_group
        with labels.collective("control"):
            if self.size >= TREE_FROM and backend_for(flags.device.type, group) == "gloo":
                rows = flags.new_empty(self.size, *flags.shape)
                dist.gather(flags, list(rows) if self.rank == 0 else None, group_dst=0, group=group)
                if self.rank == 0:
                    torch.amax(rows, 0, out=flags)
                dist.broadcast(flags, group_src=0, group=group)
            else:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        self._sent = flags

    def sum(self, values: torch.Tensor) -> None:
        with labels.collective("control"):
            dist.all_reduce(values, group=self.group)
        self._sent = values


ATTRIBUTES = ("rank", "size", "averaged_ranks", "replica", "pairs_by_unit", "group", "flags_device", "on_streams")
METHODS = (
    "reduce_scatter", "all_gather", "all_reduce", "all_to_all", "forget", "put_aside", "meet", "call", "broadcast",
    "maximum", "sum",
)  # fmt: skip
"""Methods that a wrapper copies from the Comm below it, so that a call does not pass through every layer."""


class WrappedComm(Comm):
    """Acts as the Comm `below`, except for the methods and attributes that a subclass overrides."""

    def __init__(self, below: Comm) -> None:
        self._below = below
        for name in (*ATTRIBUTES, *METHODS):
            if getattr(type(self), name) is getattr(Comm, name):
                setattr(self, name, getattr(below, name))


class Source:
    """The source of one unit's full parameters: here the shards of all ranks, gathered at each launch, with nothing
    kept in between. A subclass has a nearer copy (hpZ's secondary shards).
    """

    def __init__(self, comm: Comm, sizes: Sizes = None) -> None:
        self._comm, self._sizes = comm, sizes

    def launch(self, full: torch.Tensor, unit: str) -> Handle:
        """Starts filling `full`, (N · shard_numel,), of which this rank's slice is already filled."""
        return self._comm.all_gather(full, unit, self._sizes)

    def before_release(self, full: torch.Tensor, unit: str) -> None:
        """`full` is about to lose its memory: a source that keeps a copy takes it now."""

    def held_tensors(self, unit: str) -> Iterator[labels.Held]:
        """Yields the tensors that it keeps for `unit`."""
        return iter(())

    def after_update(self) -> None:
        """Some rank's shard has been updated."""
        self.invalidate()

    def invalidate(self) -> None:
        """Some rank's shard has changed: a kept copy is invalid."""


def rank_slices(full: torch.Tensor, ranks: int, sizes: Sizes) -> tuple[torch.Tensor, ...]:
    """Returns each rank's slice of `full`."""
    return full.split(full.numel() // ranks if sizes is None else [*sizes])


def slice_of(full: torch.Tensor, rank: int, ranks: int, sizes: Sizes) -> torch.Tensor:
    """Returns a rank's slice of `full`, without splitting the whole."""
    numel = full.numel() // ranks if sizes is None else sizes[rank]
    return full.narrow(0, rank * numel if sizes is None else sum(sizes[:rank]), numel)


def backend_for(device: str, group: dist.ProcessGroup) -> str:
    """Returns the group's backend for tensors on that kind of device, or "" if it has none."""
    per_device = dict(entry.split(":") for entry in dist.get_backend_config(group).split(",") if ":" in entry)
    return per_device.get(device, "")
