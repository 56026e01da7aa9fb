"""torch DistributedDataParallel as an engine: 4ψ parameters + 4ψ gradients + 8ψ Adam states in fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel

from ..zero import labels
from ..zero.comm.base import FAKE
from ..zero.layout import MemoryOrder
from .peer_engine import PeerEngine


class DdpEngine(PeerEngine):
    """`loss = engine(*inputs)`, `engine.backward(loss)`, `engine.step()`, as in our stages."""

    def __init__(self, module: nn.Module, optimizer: optim.Optimizer, **options: Any) -> None:
        self.module = module
        self.optimizer = optimizer
        self._ddp = DistributedDataParallel(module, init_sync=False, **options)
        group = self._ddp.process_group
        _start_alike(module, options.get("broadcast_buffers", True), group)
        if dist.get_backend(group) == FAKE:
            self._ddp.register_comm_hook(None, lambda _, bucket: _reduce_alone(bucket, group))
        # torch-private, pinned by a test: DDP's broadcast of buffers before a forward is control traffic.
        self._ddp._sync_buffers = _as_control(self._ddp._sync_buffers)  # type: ignore[method-assign]

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Runs the module's forward. Raises RuntimeError, with advice, if a parameter got no gradient before."""
        try:
            return self._ddp(*inputs, **named_inputs)
        except RuntimeError as error:
            if "find_unused_parameters=True" in str(error):
                words = "some parameters got no gradient in the last step; set strategy.find_unused_parameters=true"
                raise RuntimeError(f"ddp: {words}") from error
            raise

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the gradients down to the global norm `max_norm`; returns the previous norm, 0-dim."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Backwards inside keep their gradients on this rank."""
        return self._ddp.no_sync()


def _start_alike(module: nn.Module, buffers: bool, group: dist.ProcessGroup) -> None:
    """Gives every rank of the group its first rank's parameters and, with `buffers`, its buffers, each in place.

    DDP's own first broadcast, `init_sync`, uses flat copies that gloo's thread frees at any time, so the bytes during
    construction would differ from run to run. Raises torch's RuntimeError if the ranks' shapes differ.
    """
    parameters: list[torch.Tensor] = list(module.parameters())
    with labels.collective("control", labels.BUFFERS), torch.no_grad():
        _verify_param_shape_across_processes(group, parameters)  # torch-private, pinned by a test
        for tensor in [*parameters, *(module.buffers() if buffers else ())]:
            here, order = tensor.detach(), MemoryOrder.of(tensor)
            flat = order.flatten(here)  # a view, unless the memory has gaps
            dist.broadcast(flat, group_src=0, group=group)
            if flat.data_ptr() != here.data_ptr():
                here.copy_(order.view(flat))


def _reduce_alone(bucket: dist.GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Reduces a bucket as DDP's reducer does by default, which fails with a simulated world's group."""
    buffer = bucket.buffer()
    dist.all_reduce(buffer.div_(group.size()), group=group, async_op=True)  # the reducer waits at the backward's end
    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    reduced.set_result(buffer)
    return reduced


def _as_control(send: Any) -> Any:
    def labeled(*arguments: Any) -> Any:
        with labels.collective("control", labels.BUFFERS):
            return send(*arguments)

    return labeled
