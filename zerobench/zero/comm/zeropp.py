"""ZeRO++ (arXiv 2306.10209) on stage 3: ways to send fewer bytes between nodes, each a Comm or a source.

    qwZ    parameters are gathered in int8                 every rank computes with the decoded values, the owner too
    hpZ    secondary shards: once a unit has been gathered, each rank of a node keeps 1/L of it, in the parameters'
           dtype, and later gathers stay within the node, until the parameters change
    qgZ    gradients are exchanged in int4                 each rank decodes the slices that it receives, sums in fp32

With bf16 parameters and gradients and Z nodes, a node sends to the others (Z-1)/Z times these bytes per parameter::

                forward   backward   gradients            a block of B elements adds its fp32 scale, 4/B per element:
    zero3       2         2          2                    int8 1 + 4/B, int4 1/2 + 4/B
    ZeRO++      1         0          1/2

Masters, optimizer states and state dicts are never quantized: they are gathered with `Comm.exact`.

Options that reduce the error at the same or fewer bytes between nodes:

    bits_within   qgZ's hop within a node in 8 bits instead of 4 (SDP4Bit, arXiv 2410.15526)
    differences   hpZ's secondary shards stay; after an update each rank sends the other nodes its slice minus their
                  copy of it, in int4 (SDP4Bit's weight differences), in place of qwZ

The kept shards are not part of a checkpoint: a load drops them, and the next gather is exact. Error feedback as in LoCo
(arXiv 2407.04480) and Hadamard rotations as in SDP4Bit were tried without benefit: docs/how-to/topology.md.

[Note: two hops]
With several nodes qgZ's first hop is within the node. Rank (z, l) quantizes block m of its gradients (blocks as in
comm/hierarchical.py's note) for local rank m, dequantizes the L-1 blocks that it receives and adds its own, exact one:
the node's sum of block l, in fp32. It quantizes slice y of this sum for node y, and sums slice z in the same way.
Gradients are divided by the number of ranks beforehand, so that the sum is the mean. Its error per element is at most

    sum over all nodes, and over L-1 ranks of each node, of (their block's bound)  +  the bounds of Z-1 sums

where a block's bound is half a step (comm/quantize.py), m/14 with m the block's largest magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from .. import labels
from .base import Comm, Handle, Into, Sizes, Source, WrappedComm
from .hierarchical import Hierarchical, Hops, Nodes, connect_groups, nodes_of
from .quantize import DTYPES, LEVELS, Codec


@dataclass(frozen=True)
class Zeropp:
    """The parts of ZeRO++ in use, elements per scale, and options. Raises ValueError for invalid options."""

    quantize_weights: bool = False
    secondary_shards: bool = False
    quantize_gradients: bool = False
    weight_block: int = 256
    gradient_block: int = 256
    bits_within: int = 4
    differences: bool = False

    def __post_init__(self) -> None:
        if self.bits_within not in LEVELS:
            raise ValueError(f"zeropp: bits_within is {self.bits_within!r}; use 4 or 8")
        if self.bits_within != 4 and not self.quantize_gradients:
            raise ValueError("zeropp: bits_within is for quantized gradients; add quantize_gradients=True")
        if self.differences and (self.quantize_weights or not self.secondary_shards):
            raise ValueError(
                "zeropp: differences are from secondary shards, in place of int8; let secondary_shards be True and"
                " quantize_weights False"
            )
        for name in ("weight_block", "gradient_block"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 8:
                raise ValueError(f"zeropp: {name} is {value!r}; use a whole number of at least 8 elements")


class ZeroppComm(WrappedComm):
    """Quantizing collectives over exact ones (`below`, Hierarchical if there are several nodes)."""

    def __init__(self, below: Comm, nodes: Nodes, policy: Zeropp) -> None:
        super().__init__(below)
        self._nodes = nodes
        self._policy = policy
        self._weights = Codec(8, policy.weight_block)
        codecs = (Codec(bits, policy.gradient_block) for bits in (policy.bits_within, 4))
        hops = zip((nodes.within, nodes.between), codecs, strict=True)
        self._reductions = [(comm, codec) for comm, codec in hops if comm.size > 1]
        self._kept: list[DifferenceShard] = []
        self._hops = below.hops if isinstance(below, Hierarchical) else Hops()

    @property
    def exact(self) -> Comm:
        return self._below

    def new_source(self, sizes: Sizes = None) -> Source:
        if self._policy.differences:
            self._kept.append(DifferenceShard(self.exact, self._nodes, self._hops, Codec(4, self._policy.weight_block)))
            return self._kept[-1]
        return SecondaryShard(self, self._nodes.within) if self._policy.secondary_shards else Source(self)

    def forget(self) -> None:
        for source in self._kept:
            source.invalidate()

    def put_aside(self) -> Callable[[], None]:
        stack = ExitStack()
        for source in self._kept:
            stack.callback(source.put_aside())
        return stack.close

    def all_gather(self, full: torch.Tensor, unit: str = "", sizes: Sizes = None) -> Handle:
        """Gathers quantized slices; every rank decodes all slices, its own too, so that all have equal parameters."""
        if not self._policy.quantize_weights or full.dtype not in DTYPES:
            return self._below.all_gather(full, unit)
        slices = full.view(self.size, -1)
        payloads = new_payloads(self._weights, slices, unit)
        self._weights.encode(slices[self.rank : self.rank + 1], payloads[self.rank : self.rank + 1])
        gather = self._below.all_gather(payloads.view(-1), unit)
        return Handle([gather], partial(_decode_all, self._weights, payloads, slices))

    def reduce_scatter(self, full: torch.Tensor, unit: str = "", into: Into = None, sizes: Sizes = None) -> Handle:
        if not self._policy.quantize_gradients or full.dtype not in DTYPES:
            return self._below.reduce_scatter(full, unit, into)
        own = full.view(self.size, -1)[self.rank] if into is None else into
        reduction = QuantizedReduction(self._reductions, full, own, unit)
        return self._hops.launch(*[reduction.send] * len(self._reductions), finish=reduction.finish)


class QuantizedReduction:
    """qgZ's reduce-scatter of `full`, hop by hop. [Note: two hops]

    `rows`   the input of the current hop, (n, m): row j is sent to rank j of the hop, quantized; the own row stays
    `here`   received payloads, (n, payload_bytes)
    """

    def __init__(self, hops: list[tuple[Comm, Codec]], full: torch.Tensor, into: torch.Tensor, unit: str) -> None:
        self._unit = unit
        self._to_come = list(hops)
        self._into = into
        self._sum = full
        self._hop: Comm | None = None

    def send(self) -> Handle:
        """Sums the payloads of the previous hop, then launches the next one."""
        self._take_in()
        self._hop, self._codec = hop, codec = self._to_come.pop(0)
        self._rows = self._sum.view(hop.size, -1)
        self._to, self._here = (new_payloads(codec, self._rows, self._unit) for _ in range(2))
        for peer in range(hop.size):
            if peer != hop.rank:
                codec.encode(self._rows[peer : peer + 1], self._to[peer : peer + 1])
        return hop.all_to_all(self._to.view(-1), self._here.view(-1), "reduce_scatter", self._unit)

    def finish(self) -> None:
        """Writes the sum to its destination and releases everything else."""
        self._take_in()
        self._into.copy_(self._sum)
        del self._into, self._sum, self._rows

    def _take_in(self) -> None:
        """Computes the sum so far, (m,) fp32, from the own row and the received payloads."""
        if self._hop is None:
            return
        drop(self._to)
        own = self._hop.rank
        total = self._rows[own].float()
        if total.data_ptr() == self._rows[own].data_ptr():  # fp32 gradients: `float` made no copy, and must stay intact
            total = total.clone()
        labels.label(total, labels.COMMUNICATION, f"{self._unit} sum")
        decoded = torch.empty_like(total)
        for peer in range(self._hop.size):
            if peer != own:
                self._codec.decode(self._here[peer : peer + 1], decoded.unsqueeze(0))
                total += decoded
        self._sum = total
        drop(self._here)


class SecondaryShard(Source):
    """hpZ for one unit: 1/L of its full parameters, (numel / L,) in their dtype, kept from the first release on."""

    def __init__(self, comm: Comm, within: Comm) -> None:
        super().__init__(comm)
        self._within = within
        self._shard: torch.Tensor | None = None

    def launch(self, full: torch.Tensor, unit: str) -> Handle:
        """Gathers from the node's secondary shards if they exist, otherwise from all ranks."""
        if self._shard is None:
            return self._comm.all_gather(full, unit)
        self._block(full).copy_(self._shard)
        return self._within.all_gather(full, unit)

    def before_release(self, full: torch.Tensor, unit: str) -> None:
        """Keeps a copy of this rank's block, unless one exists."""
        if self._shard is None:
            with torch.inference_mode(False), torch.no_grad():
                block = self._block(full).clone()
            self._shard = labels.label(block, labels.PARAMETERS, f"{unit} secondary")

    def held_tensors(self, unit: str) -> Iterator[labels.Held]:
        if self._shard is not None:
            yield labels.Held(self._shard, labels.PARAMETERS, f"{unit} secondary")

    def invalidate(self) -> None:
        self._shard = None

    def _block(self, full: torch.Tensor) -> torch.Tensor:
        return full.view(self._within.size, -1)[self._within.rank]


class DifferenceShard(SecondaryShard):
    """Secondary shards that are kept for good: after an update, differences from them are sent to other nodes, in int4.

    All ranks with a copy of a block add the same decoded differences to it, including the owner of a slice, so that the
    copies stay equal, and the next difference contains the error of this one.
    """

    def __init__(self, comm: Comm, nodes: Nodes, hops: Hops, codec: Codec) -> None:
        super().__init__(comm, nodes.within)
        self._between, self._hops, self._codec = nodes.between, hops, codec
        self._is_behind = False

    def launch(self, full: torch.Tensor, unit: str) -> Handle:
        """Brings the secondary shards up to date, if they exist, and gathers from them; otherwise from all ranks."""
        is_behind, self._is_behind = self._is_behind, False
        if self._shard is None or not is_behind:
            return super().launch(full, unit)
        between, slices = self._between, self._shard.view(self._between.size, -1)
        payloads = new_payloads(self._codec, slices, unit)
        own = slice(between.rank, between.rank + 1)
        difference = self._block(full).view(between.size, -1)[own].float().sub_(slices[own])
        self._codec.encode(difference, payloads[own])

        def gather_within() -> Handle:
            for row in range(between.size):
                self._codec.decode(payloads[row : row + 1], difference)
                slices[row] += difference[0]
            drop(payloads)
            self._block(full).copy_(slices.view(-1))
            return self._within.all_gather(full, unit)

        return self._hops.launch(lambda: between.all_gather(payloads.view(-1), unit), gather_within)

    def put_aside(self) -> Callable[[], None]:
        """Moves the copy to host memory; returns the function that brings it back."""
        is_behind, device = self._is_behind, None if self._shard is None else self._shard.device
        aside = None if self._shard is None else self._shard.to("cpu", copy=True)
        self.invalidate()

        def restore() -> None:
            shard = None if aside is None else aside.to(device, copy=True)
            self._shard = None if shard is None else labels.label(shard, labels.PARAMETERS, "secondary")
            self._is_behind = is_behind

        return restore

    def after_update(self) -> None:
        """Keeps the copy: the next gather sends the difference. In a dtype that cannot be quantized, drops the copy."""
        self._is_behind = True
        if self._shard is not None and self._shard.dtype not in DTYPES:
            self.invalidate()


def new_payloads(codec: Codec, slices: torch.Tensor, unit: str) -> torch.Tensor:
    """Allocates a payload for each of `slices`, (rows, numel): (rows, payload_bytes) uint8, not filled."""
    payloads = slices.new_empty(len(slices), codec.payload_bytes(slices.shape[1]), dtype=torch.uint8)
    return labels.label(payloads, labels.COMMUNICATION, f"{unit} payload")


def _decode_all(codec: Codec, payloads: torch.Tensor, slices: torch.Tensor) -> None:
    """Decodes slice by slice, so that temporaries have the size of one slice, and frees the payloads."""
    for row in range(len(slices)):
        codec.decode(payloads[row : row + 1], slices[row : row + 1])
    drop(payloads)


def drop(payloads: torch.Tensor) -> None:
    """Frees payloads that were read or sent, even though gloo's threads may keep references a moment longer."""
    payloads.untyped_storage().resize_(0)


def connect_zeropp(
    group: dist.ProcessGroup | None, device: torch.device, node_size: int | None, shard_group: int | None,
    policy: Zeropp | None,
) -> Comm:  # fmt: skip
    """Returns the Comm over `group`, in nodes or shard groups (comm/hierarchical.py), under a policy. Collective.
    Raises ValueError for options that exclude each other.
    """
    below = connect_groups(group, device, node_size, shard_group)
    if policy is None or below.size == 1:
        return below
    if shard_group is not None:
        raise ValueError("shard_group: ZeRO++ has shards over all ranks and secondary ones in nodes; leave one out")
    codes = policy.quantize_weights or policy.quantize_gradients
    if (not codes or policy.differences) and (node_size or below.size) == below.size:
        what = "differences have no other node to go to" if policy.differences else "secondary shards change nothing"
        raise ValueError(
            f"zeropp: all {below.size} ranks are one node, so that {what}; let node_size be a smaller divisor"
        )
    nodes = below.nodes if isinstance(below, Hierarchical) else nodes_of(below, device, node_size or below.size)
    return ZeroppComm(below, nodes, policy)
