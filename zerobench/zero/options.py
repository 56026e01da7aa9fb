"""The options of `zerobench.initialize`, and the modes that set their defaults.

Some have a short form, as on the command line: offload="cpu", zeropp="qwz", wire_dtype="bf16".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn, optim

from .comm.zeropp import Zeropp
from .offload.placement import NvmeOffload, Offload
from .optim.segments import OWNED
from .optim.step_by_tiles import ONE_PASS, TILE_BYTES
from .precision import DTYPES, LOOKS_ITSELF, Dtypes, LossScaling

AUTO = "auto"
"""The value of an option that is chosen from the model."""

BUCKETS_A_SHARD, BUCKETS_A_MODEL = 2, 64
BUCKET_LIMITS = 2**20, 25 * 2**20
"""Smallest and largest automatic bucket in bytes: small compared with a rank's states, since two buckets are in flight,
and large enough to use the link's bandwidth.
"""

IN_GROUPS = (
    "; groups of {0} ranks that keep shards from forward to backward, as FSDP2 does for an integer, are"
    ' zeropp="hpz" with node_size={0}'
)
"""The message for another system's number of ranks in `reshard_after_forward`."""

REDUCE_WITH = ("reduce_scatter", "all_reduce")
"""Values of `Options.reduce_with`: they send one times a bucket's size, or two."""

SHARDS = MASTERS, PARAMETERS = ("masters", "parameters")
"""Values of `Options.shards`; None, in cells recorded before the option existed, means "parameters"."""

SWITCHES = ("reshard_after_forward", "overlap_gather", "arena", "broadcast_buffers", "elementwise")
"""Options that are True or False."""

BUCKETED = ("bucket_bytes", "reduce_with")
"""Options of the strategies with buckets; strategies whose units are modules do not have them."""

MODES: dict[str, dict[str, Any]] = {
    "own": {},
    "paper": {"bucket_bytes": 25 * 2**20, "keep_root": False, "shards": PARAMETERS},
    "vendor": {
        "bucket_bytes": 25 * 2**20, "reduce_with": "all_reduce", "keep_root": True, "reshard_after_forward": False,
        "persistence_numel": 100_000, "shards": PARAMETERS,
    },
}  # fmt: skip
"""Sets of defaults that reproduce other systems, so that a difference can be attributed to a single choice.

own      the best choices that we measured
paper    ZeRO, arXiv 1910.02054: stage 3 gathers every parameter again for the backward, 3ψ in total
vendor   DeepSpeed 0.19: buckets are all-reduced (stages 1, 2: 3ψ), stage 3 keeps gathered parameters until the
         backward (models below 0.5 G parameters, its max_reuse_distance) and parameters of up to 1e5 elements for good
"""


def usual_tile_bytes(updated_by: str, kind: object, fused: bool) -> int:
    """Returns the default of `Options.tile_bytes` for an optimizer that runs on this type of device."""
    return ONE_PASS if updated_by == "cuda" and fused and kind in LOOKS_ITSELF else TILE_BYTES[updated_by]


def automatic_bucket_bytes(psi_bytes: int, ranks: int) -> int:
    """Returns half of a rank's shard, or a 64th of the parameters, which every rank has whole, if that is more: as
    shards shrink with the number of ranks, the number of collectives, each of which adds its latency, stays constant.
    """
    least, most = BUCKET_LIMITS
    return min(max(psi_bytes // ranks // BUCKETS_A_SHARD, psi_bytes // BUCKETS_A_MODEL, least), most)


@dataclass(frozen=True)
class Options:
    """The options of an engine. Bytes are in the parameters' own dtype.

    `bucket_bytes`       largest unit of stages 1 and 2 (a larger parameter is divided over several); "auto": half of a
                         rank's shard of the parameters, or a 64th of them if that is more; from 1 to 25 MiB
    `prefetch`           units gathered ahead in stage 3
    `units`              stage 3: the modules that are units; default: the elements of every outermost
                         nn.ModuleList, the rest is the root unit
    `persistence_numel`  stage 3: parameters of up to this many elements stay whole on every rank
    `keep_root`          stage 3: the root unit stays from forward to backward; "auto": it is also freed while backward
                         is at other units (units/root.py)
    `reshard_after_forward`  stage 3: False keeps every unit from forward to backward, sending 2ψ instead of 3ψ
    `shards`             stage 3, half precision without offload. "masters": a rank keeps only its part of the masters,
                         and rounds it for each gather; "parameters": it keeps its part of the parameters as well
    `overlap_gather`     stages 1 and 2: updated parameters are gathered while the next forward runs; False: the step
                         waits for them
    `reduce_with`        reduce_scatter, or all_reduce at twice the volume, as other systems do
    `gradient_dtype`     dtype in which gradients of half parameters are accumulated; default: the parameter's dtype
    `wire_dtype`         dtype that reductions send; default: the gradients' dtype
    `tile_bytes`         largest temporary fp32 gradients of an update; default: usual_tile_bytes, or None, one tile,
                         for an optimizer that is not torch's
    `loss_scaling`       for fp16: see precision.LossScaling
    `device`             device of a model that was built on the meta device; default: the CPU
    `initial_dtype`      the dtype in which its values are drawn, before the cast to the parameters' own
    `initial_device`     the device on which they are drawn; default: the CPU, so that they do not depend on the device
    `arena`              temporary gradients use slots that are allocated once: bucket.py
    `broadcast_buffers`  copy rank 0's buffers to all ranks before each forward, as DDP does
    `elementwise`        declares an optimizer from outside torch elementwise; it may use p.ndim, but not sizes: it
                         gets segments, which have their parameter's number of dimensions, all except the last of size 1
    `offload`            the states that leave the device, and their tier: offload.placement.Offload
    `node_size`          ranks per node: gathers and reductions run in two hops (comm/hierarchical.py)
    `shard_group`        ranks per shard group; the groups are replicas; default: all (comm/hierarchical.py)
    `ignored_parameters`  parameters that are left as they are: neither sent, divided, reduced, updated nor saved
    `zeropp`             stage 3: the parts of ZeRO++ in use (comm/zeropp.py)
    """

    bucket_bytes: int | str = AUTO
    prefetch: int = 1
    units: tuple[nn.Module, ...] | None = field(default=None, compare=False)
    persistence_numel: int = 0
    keep_root: bool | str = AUTO
    reshard_after_forward: bool = True
    shards: str | None = MASTERS
    overlap_gather: bool = True
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
    ignored_parameters: tuple[nn.Parameter, ...] = field(default=(), compare=False)

    def resolved(self, trainable: Iterable[nn.Parameter], ranks: int) -> Options:
        """Returns the options for a model of these parameters on `ranks` ranks, with automatic ones resolved."""
        if self.bucket_bytes != AUTO:
            return self
        psi_bytes = sum(p.numel() * p.element_size() for p in trainable)
        return replace(self, bucket_bytes=automatic_bucket_bytes(psi_bytes, ranks))

    def dtypes_for(self, parameter: torch.dtype, ranks: int) -> Dtypes:
        """Returns the dtypes of a unit with parameters of this dtype; one rank has no wire."""
        return Dtypes.of(parameter, self.gradient_dtype, self.wire_dtype if ranks > 1 else None)

    @property
    def delayed_after(self) -> int | None:
        """The step after which updates are one step late; None: never."""
        return None if self.offload is None else self.offload.delayed_after

    def device_of(self, module: nn.Module) -> torch.device:
        """Returns the device where the parameters of `module` are, or will be."""
        return next((p.device for p in module.parameters() if not p.is_meta), self.device or torch.device("cpu"))

    def check(self) -> None:
        """Raises ValueError for an invalid value."""
        sizes = {"bucket_bytes": 1024, "prefetch": 0, "persistence_numel": 0, "tile_bytes": 1024}
        for name, least in sizes.items():
            value = getattr(self, name)
            if (name, value) in (("tile_bytes", None), ("tile_bytes", ONE_PASS), ("bucket_bytes", AUTO)):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: {value!r} is invalid; use a whole number of at least {least}")
        if self.offload is not None and self.offload.delayed_after is not None and self.loss_scaling is not None:
            raise ValueError(
                "offload.delayed_after: loss scaling must judge an update before the next; use bf16 or fp32"
            )
        for name in SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                is_size = name == "reshard_after_forward" and isinstance(value, int)
                groups = IN_GROUPS.format(value) if is_size else ""
                raise ValueError(f"{name}: {value!r} is invalid; use True or False{groups}")
        if not isinstance(self.keep_root, bool) and self.keep_root != AUTO:
            raise ValueError(f"keep_root: {self.keep_root!r} is invalid; use True, False or {AUTO!r}")
        if self.reduce_with not in REDUCE_WITH:
            raise ValueError(f"reduce_with: {self.reduce_with!r} is unknown; use one of {', '.join(REDUCE_WITH)}")
        if self.shards not in (None, *SHARDS):
            raise ValueError(f"shards: {self.shards!r} is unknown; use one of {', '.join(SHARDS)}")
        if self.gradient_dtype not in (None, *DTYPES.values()):
            raise ValueError(
                f"gradient_dtype: {self.gradient_dtype} cannot hold gradients; use torch.float32 or a half"
            )
        if self.wire_dtype not in (None, *DTYPES.values()):
            raise ValueError(f"wire_dtype: {self.wire_dtype} cannot be sent; use torch.float32 or a half")


def check_owned(optimizer: optim.Optimizer, options: Options) -> None:
    """Raises ValueError for an option that cannot be combined with owned matrices."""
    offload = options.offload
    refused = {
        "node_size": options.node_size, "shard_group": options.shard_group, "zeropp": options.zeropp,
        "offload (files)": offload if isinstance(offload, NvmeOffload) else None,
        "offload.fraction": offload.fraction if offload is not None and offload.fraction < 1 else None,
    }  # fmt: skip
    named = next((f"{name}: {value}" for name, value in refused.items() if value is not None), None)
    if named is not None and any(group.get(OWNED) for group in optimizer.param_groups):
        raise ValueError(
            f"{named} does not go with {type(optimizer).__name__}, whose matrices are owned whole by one rank each, in"
            " the memory of one tier; leave it out"
        )


SHORT: dict[str, dict[str, Any]] = {
    "offload": {"none": None, "cpu": Offload()},
    "zeropp": {
        "none": None,
        "qwz": Zeropp(quantize_weights=True),
        "hpz": Zeropp(secondary_shards=True),
        "qgz": Zeropp(quantize_gradients=True),
        "all": Zeropp(quantize_weights=True, secondary_shards=True, quantize_gradients=True),
    },
    "gradient_dtype": DTYPES,
    "wire_dtype": DTYPES,
    "initial_dtype": DTYPES,
}

KINDS: dict[str, type] = {"offload": Offload, "zeropp": Zeropp}
"""Option -> the type that it may have besides a short form or None."""


def spelled_out(options: dict[str, Any]) -> dict[str, Any]:
    """Returns `options` with short forms replaced by their values. Raises ValueError for an unknown one."""
    values = dict(options)
    for name, given in options.items():
        kind = KINDS.get(name)
        if isinstance(given, str) and name in ("device", "initial_device"):
            values[name] = torch.device(given)
        elif name == "ignored_parameters":
            values[name] = tuple(given)
        elif isinstance(given, str) and name in SHORT:
            if name == "offload" and given == "nvme":
                raise ValueError(
                    "offload: 'nvme' needs a folder for its files; pass zerobench.zero.NvmeOffload(path=...)"
                )
            if given not in SHORT[name]:
                raise ValueError(f"{name}: {given!r} is unknown; use one of {', '.join(SHORT[name])}")
            values[name] = SHORT[name][given]
        elif kind is not None and given is not None and not isinstance(given, kind):
            short = ", ".join(map(repr, SHORT[name]))
            raise ValueError(f"{name}: {given!r} is invalid; use {short} or a zerobench.zero.{kind.__name__}")
    return values
