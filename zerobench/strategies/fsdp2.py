"""torch's FSDP2 behind the engine's interface: `fully_shard` on the units of our stage 3, and on the root for the rest.

Tensors of a unit: its parameters' shards are DTensors, the first dimension in N parts, padded; a gather makes them
whole in buffers that exist while the unit's module runs (`fsdp2`: in forward and again in backward;
`fsdp2_no_reshard`: from forward to the end of backward). Gradients leave by one reduce-scatter per unit, after each
micro-batch. As in FSDP2's default the root stays whole between forward and backward.

In bf16 the module stays in fp32, and with it the shards, which are the master weights, and the optimizer's tensors:
4ψ/N + 4ψ/N gradients + 8ψ/N Adam states. A gather casts to bf16 before sending; whole gradients are bf16. φ frozen
parameters take 4φ/N, too; with strategy.upcast_frozen=false, as accelerate casts them since its #3848, 2φ/N.

A step sends 3ψ with resharding, minus the root, and 2ψ without; gloo, whose reduce-scatter is an all-reduce, sends
twice the bytes for the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..zero import labels
from ..zero.modules.wrapping import default_units
from .engine import PeerEngine, rebuilt


class Fsdp2Engine(PeerEngine):
    """FSDP2 over the units of stage 3.

    `prefetch`: units gathered ahead in the order of the module, 0 for FSDP2's own order. `async_gather`: gathers do not
    block. `reshard_ranks`: the number of ranks over which a unit stays partitioned between forward and backward, if
    `reshard`; None: all. `sum_gradients`: gradients are summed and divided afterwards, rather than averaged by the
    reduction. `param_dtype`: dtype in which an fp32 module computes and is gathered; `reduce_dtype`: dtype in which
    gradients are reduced; None: the module's.
    """

    shares_gradients = True
    """Between backward and update a rank has its shard of the gradients."""

    def __init__(
        self, module: nn.Module, optimizer: optim.Optimizer, reshard: bool, prefetch: int, async_gather: bool,
        sum_gradients: bool, tuned: bool = False, param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None, reshard_ranks: int | None = None,
    ) -> None:  # fmt: skip
        self.module = module
        names = {parameter: name for name, parameter in module.named_parameters()}
        device = next(module.parameters()).device.type
        world = dist.group.WORLD
        assert world is not None
        mesh = DeviceMesh.from_group(world, device)  # a mesh of its own might choose NCCL over gloo
        how: Any = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype)}
        units: list[Any] = [unit for _, unit in default_units(module)]
        for unit in reversed(units):  # a tile before the block around it, which takes the rest
            fully_shard(unit, reshard_after_forward=reshard_ranks or reshard, **how)
        for unit in units if reshard_ranks else ():
            unit.register_forward_hook(_label_parts)  # after FSDP2's own
        self._root: Any = fully_shard(module, reshard_after_forward=None if reshard else False, **how)
        for index, unit in enumerate(units if prefetch else []):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + prefetch])
            unit.set_modules_to_backward_prefetch(units[max(0, index - prefetch) : index][::-1])
        if async_gather:
            self._root._set_unshard_async_op(True)  # torch-private, used in a test
        for sharded in [*units, self._root] if sum_gradients else []:
            sharded.set_force_sum_reduction_for_comms(True)
        shards = dict(module.named_parameters())
        self.optimizer = rebuilt(optimizer, lambda parameter: shards[names[parameter]])

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep whole gradients on this rank."""
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)


def _label_parts(unit: nn.Module, *_: Any) -> None:
    """Labels parts that stay from forward to backward: new tensors, which the ledger cannot identify."""
    with torch.no_grad():
        for name, parameter in unit.named_parameters():
            if isinstance(parameter, DTensor):
                labels.label(parameter.to_local(), labels.PARAMETERS, name)
