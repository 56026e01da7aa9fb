"""Engines over torch DistributedDataParallel: 4ψ parameters + 4ψ gradients + 8ψ Adam states in fp32.

With fp32 master weights over a half-precision model, the 16ψ of ZeRO, arXiv 1910.02054, section 3.1:

    parameters   2ψ    the module's own, bf16 or fp16
    gradients    2ψ    in DDP's buckets, all-reduced in the module's dtype
    masters      4ψ    fp32, one flat tensor per parameter; the optimizer holds *shares* of it, at most a tile large
    optimizer    8ψ    Adam's states of the masters
    tile               fp32 gradients of the shares that are updated together; none in one pass (optim/one_pass.py)

Parameters in fp32 have no master: their shares are views of them. A flat parameter is in the order of its memory; a
parameter with gaps there has its own master in any dtype.

With torch's ZeroRedundancyOptimizer: 4ψ parameters + 4ψ gradients + about 8ψ/N Adam states. Whole parameters are
assigned to ranks, the largest first to the rank with the fewest elements. DDP all-reduces the gradients (2ψ), each rank
updates its parameters and broadcasts them (1ψ), one after another or, as bucket views, all together. Its overlap with
DDP is not offered: torch does not support it on gloo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel

from ..zero import labels
from ..zero.comm.base import FAKE
from ..zero.layout import MemoryOrder, Segment
from ..zero.optim.one_pass import OnePass
from ..zero.optim.segments import owned_by, owners_of, set_aside, swap_parameters
from ..zero.optim.step_by_tiles import ONE_PASS, TILE_BYTES, TileBuffers, update_tiles
from ..zero.precision import (
    HALF,
    GradientScaling,
    LossScaling,
    Share,
    cut_in_tiles,
    flattened,
    root_of_powers,
    sum_of_powers,
)
from ..zero.units.unit import align_numel
from .engine import PeerEngine, options_of


class DdpEngine(PeerEngine):
    """DDP with the harness's own first broadcast; traffic of buffers is labeled as control traffic."""

    def __init__(self, module: nn.Module, optimizer: optim.Optimizer, **options: Any) -> None:
        self.module = module
        self.optimizer = optimizer
        self._ddp = DistributedDataParallel(module, init_sync=False, **options)
        group = self._ddp.process_group
        _start_alike(module, options.get("broadcast_buffers", True), group)
        if dist.get_backend(group) == FAKE:
            self._ddp.register_comm_hook(None, lambda _, bucket: _reduce_alone(bucket, group))
        # torch-private, pinned by a test: DDP's broadcast of buffers before a forward is control traffic.
        sync_buffers = self._ddp._sync_buffers

        def sync_as_control() -> None:
            with labels.collective("control", labels.BUFFERS):
                sync_buffers()

        self._ddp._sync_buffers = sync_as_control  # type: ignore[method-assign]

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Runs the module's forward. Raises RuntimeError, with advice, if a parameter got no gradient before."""
        try:
            return self._ddp(*inputs, **named_inputs)
        except RuntimeError as error:
            if "find_unused_parameters=True" in str(error):
                raise RuntimeError(
                    "ddp: some parameters got no gradient in the last step; set strategy.find_unused_parameters=true"
                ) from error
            raise

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Backwards inside keep their gradients on this rank."""
        return self._ddp.no_sync()


def _start_alike(module: nn.Module, buffers: bool, group: dist.ProcessGroup) -> None:
    """Copies the parameters and, with `buffers`, the buffers of the group's first rank to all its ranks, in place.

    DDP's own first broadcast, `init_sync`, uses flat copies that gloo's thread frees at any time, so the bytes during
    construction would differ from run to run. Raises torch's RuntimeError if the ranks' shapes differ.
    """
    parameters: list[torch.Tensor] = list(module.parameters())
    with labels.collective("control", labels.BUFFERS), torch.no_grad():
        _verify_param_shape_across_processes(group, parameters)  # torch-private, pinned by a test
        for tensor in [*parameters, *(module.buffers() if buffers else ())]:
            values, order = tensor.detach(), MemoryOrder.of(tensor)
            flat = order.flatten(values)  # a view, unless the memory has gaps
            dist.broadcast(flat, group_src=0, group=group)
            if flat.data_ptr() != values.data_ptr():
                values.copy_(order.view(flat))


def _reduce_alone(bucket: dist.GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Reduces a bucket as DDP's reducer does by default, which fails with a simulated world's group."""
    buffer = bucket.buffer()
    dist.all_reduce(buffer.div_(group.size()), group=group, async_op=True)  # the reducer waits at the backward's end
    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    reduced.set_result(buffer)
    return reduced


class ParameterShare(Share):
    """Elements [start, stop) of a parameter's master; their gradient is DDP's."""

    def __init__(
        self, parameter: nn.Parameter, order: MemoryOrder, master: torch.Tensor, segment: Segment,
        is_whole: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(order.view(master) if is_whole else master[segment.start : segment.stop])
        self.parameter = parameter
        self.order = order
        self.span = segment

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns these elements, (numel,), of a tensor of the parameter's shape; a view if it is dense."""
        return self.order.flatten(whole)[self.span.start : self.span.stop]

    @property
    def rounded(self) -> torch.Tensor | None:
        parameter = self.parameter.detach()
        has_view = parameter.dtype in HALF and parameter.stride() == self.order.strides
        return self.part_of(parameter) if has_view else None

    def gradient(self) -> torch.Tensor | None:
        return None if self.parameter.grad is None else self.part_of(self.parameter.grad)


class MasterDdpEngine(DdpEngine):
    """DDP whose optimizer updates fp32 masters of the module's parameters, with loss scaling if asked for."""

    def __init__(
        self, module: nn.Module, optimizer: optim.Optimizer, *, tile_bytes: int = TILE_BYTES["cpu"],
        loss_scaling: LossScaling | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(module, optimizer, **options)  # DDP gives every rank rank 0's values: masters come after
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._scaling = GradientScaling(loss_scaling, self._parameters[0].device, self._norm)
        self.scaler = self._scaling.scaler
        self._orders = {p: MemoryOrder.of(p) for p in self._parameters}
        named = {p: name for name, p in module.named_parameters()}
        self._masters = [_new_master(named[p], p, order) for p, order in self._orders.items()]
        device = self._parameters[0].device
        in_one_pass, tile_bytes = tile_bytes == ONE_PASS, tile_bytes or TILE_BYTES[device.type]
        align = align_numel(optimizer, 4)  # so that shares are updated as the whole is (zero/layout.py says why)
        max_numel = max(tile_bytes // 4 // align, 1) * align
        owned = owners_of(owned_by(optimizer), self._parameters, 1)
        shares = []
        for i, (p, master) in enumerate(zip(self._parameters, self._masters, strict=True)):
            step = master.numel() if in_one_pass or p in owned else max_numel
            for start in range(0, master.numel(), step or 1):
                segment = Segment(i, start, min(start + step, master.numel()), start)
                shares.append(ParameterShare(p, self._orders[p], master, segment, is_whole=p in owned))
        index = {p: i for i, p in enumerate(self._parameters)}
        segments: Any = shares  # of one rank
        swap_parameters(optimizer, set_aside(optimizer, optimizer.param_groups), index, segments, self._orders)
        self._tiles = cut_in_tiles(shares, max_numel)
        self._buffers = TileBuffers(self._tiles)
        self._one_pass = OnePass.of(optimizer, shares, device) if in_one_pass else None

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagates the loss times the scale; DDP reduces the scaled gradients."""
        super().backward(self.scaler.scaled(loss))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return self._scaling.clip(max_norm, norm_type)  # `step` scales the gradients down

    def step(self) -> None:
        """Makes one update of the masters, and from them of the parameters; consumes the gradients. With loss scaling
        it is skipped if gradients overflowed: they are equal on all ranks, and so is the decision.
        """
        with self._scaling.judging(self.optimizer) as skips:
            if not skips:
                coefficient = self._scaling.coefficient
                with torch.no_grad():
                    if self._one_pass is not None:
                        hooks_wrote = self._one_pass.step(coefficient)
                    else:
                        hooks_wrote = update_tiles(
                            self.optimizer, self._tiles, coefficient, self._buffers, self._rounded
                        )
                    for (parameter, order), master in zip(self._orders.items(), self._masters, strict=True):
                        # not rounded tile by tile: after hooks, or with gaps, so that there is no view
                        is_unrounded = hooks_wrote or parameter.stride() != order.strides
                        if is_unrounded and _has_master(parameter, order):
                            parameter.copy_(order.view(master))
        self.zero_grad()

    @contextmanager
    def _rounded(self, tile: Sequence[ParameterShare]) -> Iterator[None]:
        yield
        for share in tile:
            if (rounded := share.rounded) is not None:
                rounded.copy_(flattened(share.tensor))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._scaling.forget()
        self.module.zero_grad(set_to_none)

    def _norm(self, norm_type: float) -> torch.Tensor:
        if self._one_pass is not None and norm_type == 2:
            return root_of_powers(self._one_pass.sum_of_squares(), norm_type)
        gradients = [order.flatten(p.grad) for p, order in self._orders.items() if p.grad is not None]
        return root_of_powers(sum_of_powers(gradients, norm_type, self._parameters[0].device), norm_type)


def _new_master(name: str, parameter: nn.Parameter, order: MemoryOrder) -> torch.Tensor:
    """Returns (numel,): an fp32 copy of a half-precision parameter, a view of another one if it is dense."""
    flat = order.flatten(parameter.detach())
    return labels.label(flat.float(), labels.MASTER, name) if _has_master(parameter, order) else flat


def _has_master(parameter: nn.Parameter, order: MemoryOrder) -> bool:
    return parameter.dtype in HALF or parameter.stride() != order.strides


class ZeroRedundancyEngine(DdpEngine):
    """DDP whose optimizer states are distributed over the ranks, parameter by parameter."""

    def __init__(
        self, module: nn.Module, optimizer: optim.Optimizer, bucket_bytes: int, gradient_as_bucket_view: bool,
        parameters_as_bucket_view: bool, tuned: bool = False,
    ) -> None:  # fmt: skip
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes long, for those who use it

        partitioned = ZeroRedundancyOptimizer(
            optimizer.param_groups, type(optimizer), parameters_as_bucket_view=parameters_as_bucket_view,
            **options_of(optimizer),
        )  # fmt: skip
        views: dict[str, Any] = {"gradient_as_bucket_view": gradient_as_bucket_view}
        super().__init__(module, partitioned, bucket_cap_mb=bucket_bytes / 2**20, **views)
        for name, parameter in module.named_parameters():
            labels.label(parameter, labels.PARAMETERS, name)  # as bucket views they have moved
