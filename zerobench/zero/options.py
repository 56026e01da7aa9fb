"""What a caller of `zerobench.initialize` may choose, and the three modes that choose for him."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .comm.reductions import REDUCTIONS, Reduction
from .comm.zeropp import Zeropp
from .offload.cpu import Offload
from .offload.placement import Places
from .optim.delayed_update import DelayedUpdate
from .optim.update import Update
from .precision import Dtypes, LossScaling

AUTO = "auto"
"""The value of an option that follows the model."""

BUCKETS_A_SHARD = 2
BUCKET_LIMITS = 2**20, 25 * 2**20
"""An automatic bucket is so much of a rank's shard of the parameters, within these bytes: small beside the shards, of
which two are under way, and large enough for the wire."""

BUCKETED = ("bucket_bytes", "reduce_with")
"""Options of the strategies that have buckets; units of modules have none of them."""

MODES: dict[str, dict[str, Any]] = {
    "own": {},
    "paper": {"bucket_bytes": 25 * 2**20, "keep_root": False},
    "vendor": {
        "bucket_bytes": 25 * 2**20, "reduce_with": "all_reduce", "keep_root": True, "reshard_after_forward": False,
        "persistence_numel": 100_000,
    },
}  # fmt: skip
"""Defaults that make others' choices reproducible, so that a difference can be attributed to one of them.

own      what we found best
paper    ZeRO, arXiv 1910.02054: stage 3 gathers every parameter again for the backward, 3ψ in all
vendor   DeepSpeed 0.19: buckets are all-reduced (stages 1, 2: 3ψ), stage 3 keeps what it has gathered until the
         backward (models below 0.5 G parameters, its max_reuse_distance) and parameters of up to 1e5 elements for good
"""

TILE_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
"""`Options.tile_bytes` by device where nobody says: each is a step of the optimizer, and a GPU soon done with it."""

HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Options:
    """What a caller may choose. Bytes are of the parameters' own dtype.

    `bucket_bytes`       most that a unit of stages 1 and 2 holds (a larger parameter is cut into several); "auto":
                         half of a rank's shard of the parameters, from 1 to 25 MiB
    `prefetch`           units gathered ahead in stage 3
    `units`              stage 3: the modules that are units; default: the elements of every outermost
                         nn.ModuleList, the rest is the root unit
    `persistence_numel`  stage 3: parameters of up to so many elements stay whole on every rank
    `keep_root`          stage 3: the root unit stays from forward to backward; "auto": and is given back while backward
                         is at others (units/root.py)
    `reshard_after_forward`  stage 3: False keeps every unit from forward to backward, 2ψ instead of 3ψ on the wire
    `overlap_gather`     stages 1 and 2: updated parameters travel while the next forward runs
    `reduce_with`        reduce_scatter, or all_reduce to send twice as much as others do
    `gradient_dtype`     what the gradients of half parameters are accumulated in; default: the parameter's dtype
    `wire_dtype`         what reductions send; default: the gradients' dtype
    `tile_bytes`         most that the fp32 gradients made for one part of an update take; default: TILE_BYTES says, and
                         None, one part, for an optimizer that is not torch's
    `loss_scaling`       for fp16: see precision.LossScaling
    `device`             where a model that was built on the meta device gets its values; default: the CPU
    `initial_dtype`      the dtype that they are drawn in, before they are cast to the parameters' own
    `initial_device`     the device that they are drawn on; default: the CPU, so that they do not depend on the device
    `arena`              gradients that come and go live in slots that are made once: arena.py
    `broadcast_buffers`  copy rank 0's buffers to all ranks before each forward, as DDP does
    `elementwise`        vouches for an optimizer that is not torch's
    `offload`            what leaves the device, and whereto: host.Offload
    `node_size`          ranks a node has: gathers and reductions go in two hops (groups.py)
    `shard_group`        ranks that share a shard, each group a replica of the others; default: all (groups.py)
    `zeropp`             stage 3: which parts of ZeRO++ (comm/zeropp.py)
    """

    bucket_bytes: int | str = AUTO
    prefetch: int = 1
    units: tuple[nn.Module, ...] | None = field(default=None, compare=False)
    persistence_numel: int = 0
    keep_root: bool | str = AUTO
    reshard_after_forward: bool = True
    overlap_gather: bool = False
    reduce_with: str = "reduce_scatter"
    gradient_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    tile_bytes: int | None = TILE_BYTES["cpu"]
    loss_scaling: LossScaling | None = None
    device: torch.device | None = None
    initial_dtype: torch.dtype = torch.float32
    initial_device: torch.device | None = None
    arena: bool = False
    broadcast_buffers: bool = True
    elementwise: bool = False
    offload: Offload | None = None
    node_size: int | None = None
    shard_group: int | None = None
    zeropp: Zeropp | None = None

    def settled(self, trainable: Iterable[nn.Parameter], ranks: int) -> Options:
        """The options for a model of these parameters that `ranks` share: with numbers for what follows the model."""
        if self.bucket_bytes != AUTO:
            return self
        least, most = BUCKET_LIMITS
        psi_bytes = sum(p.numel() * p.element_size() for p in trainable)
        return replace(self, bucket_bytes=min(max(psi_bytes // ranks // BUCKETS_A_SHARD, least), most))

    def dtypes_of(self, parameter: torch.dtype, ranks: int) -> Dtypes:
        """Of a unit of such parameters. Where nobody else is there, nothing travels, and nothing is rounded for it."""
        return Dtypes.of(parameter, self.gradient_dtype, self.wire_dtype if ranks > 1 else None)

    def places(self, module: nn.Module) -> Places:
        """Where the engine over `module` keeps things."""
        device = next((p.device for p in module.parameters() if not p.is_meta), self.device or torch.device("cpu"))
        return Places() if self.offload is None else self.offload.places(device)

    def new_update(self, *parts: Any) -> Update:
        """How the optimizer is run: in `step`, or late. `parts`: what Update is made of."""
        if self.offload is None or self.offload.delayed_after is None:
            return Update(*parts)
        update = DelayedUpdate(*parts)
        update.delayed_after = self.offload.delayed_after
        return update

    @property
    def reduction(self) -> Reduction:
        """How a unit's gradients are summed over the ranks."""
        return REDUCTIONS[self.reduce_with]

    def check(self) -> None:
        """Raises ValueError, one sentence, for a value that cannot be."""
        sizes = {"bucket_bytes": 1024, "prefetch": 0, "persistence_numel": 0, "tile_bytes": 1024}
        for name, least in sizes.items():
            value = getattr(self, name)
            if (name, value) in (("tile_bytes", None), ("bucket_bytes", AUTO)):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: {value!r} cannot be; use a whole number of at least {least}")
        if self.offload is not None and self.offload.delayed_after is not None and self.loss_scaling is not None:
            raise ValueError(
                "offload.delayed_after: loss scaling must judge an update before the next; use bf16 or fp32"
            )
        if not isinstance(self.keep_root, bool) and self.keep_root != AUTO:
            raise ValueError(f"keep_root: {self.keep_root!r} cannot be; use True, False or {AUTO!r}")
        if self.reduce_with not in REDUCTIONS:
            raise ValueError(f"reduce_with: {self.reduce_with!r} is unknown; use one of {', '.join(REDUCTIONS)}")
        if self.gradient_dtype not in (None, *HALVES):
            raise ValueError(
                f"gradient_dtype: {self.gradient_dtype} cannot hold gradients; use torch.float32 or a half"
            )
        if self.wire_dtype not in (None, *HALVES):
            raise ValueError(f"wire_dtype: {self.wire_dtype} cannot travel; use torch.float32 or a half")
