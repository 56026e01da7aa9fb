"""torch's FSDP2 behind the engine's face: `fully_shard` on the units of our stage 3, and on the root for the rest.

Tensors of a unit: its parameters' shards are DTensors, the first dimension in N parts, padded; a gather brings them
whole into buffers that exist while the unit's module runs (`fsdp2`: in forward and again in backward;
`fsdp2_no_reshard`: from forward to the end of backward). Gradients leave by a reduce-scatter a unit, after each
micro-batch. As by its own default the root stays whole between forward and backward.

In bf16 the module stays in fp32, and with it the shards, which are the master weights, and what the optimizer sees:
4ψ/N + 4ψ/N gradients + 8ψ/N Adam states. A gather casts to bf16 on its way out; whole gradients are bf16. φ frozen
parameters have 4φ/N, too; with strategy.upcast_frozen=false, as accelerate casts them since its #3848, 2φ/N.

A step moves 3ψ with resharding, less the root, and 2ψ without; gloo, whose reduce-scatter is an all-reduce, sends
half as much again for the gradients.
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
from .peer_engine import PeerEngine, rebuilt


class Fsdp2Engine(PeerEngine):
    """`loss = engine(*inputs)`, `engine.backward(loss)`, `engine.step()`, as our stages have it.

    `prefetch`: units gathered ahead in the order of the module, 0 for FSDP2's own order. `async_gather`: gathers do not
    block. `reshard_ranks`: over how many ranks a unit stays partitioned between forward and backward, if `reshard`;
    None: all. `sum_gradients`: gradients are summed and divided afterwards, rather than averaged by the reduction.
    `param_dtype`: what an fp32 module computes and is gathered in, `reduce_dtype`: what gradients are reduced in; None:
    as the module is.
    """

    shares_gradients = True
    """Between backward and update a rank holds its shard of them."""

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
        for place, unit in enumerate(units if prefetch else []):
            unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + prefetch])
            unit.set_modules_to_backward_prefetch(units[max(0, place - prefetch) : place][::-1])
        if async_gather:
            self._root._set_unshard_async_op(True)  # torch-private, used in a test
        for sharded in [*units, self._root] if sum_gradients else []:
            sharded.set_force_sum_reduction_for_comms(True)
        shards = dict(module.named_parameters())
        self.optimizer = rebuilt(optimizer, lambda parameter: shards[names[parameter]])

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the gradients down to the global norm `max_norm`; returns the norm that they had, 0-dim."""
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
    """Parts that stay from forward to backward are new tensors, of which the ledger cannot know what they are."""
    with torch.no_grad():
        for name, parameter in unit.named_parameters():
            if isinstance(parameter, DTensor):
                labels.label(parameter.to_local(), labels.PARAMETERS, name)
