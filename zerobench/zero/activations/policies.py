"""ZeRO-R for activations: policies for the tensors that autograd keeps between forward and backward.

For each *unit* (modules.blocks: a transformer's blocks), except small tensors::

    policy               on the device                            in host memory    cost
    none                 all saved tensors                        -
    checkpoint           the unit's inputs                        -                 a second forward
    selective            its inputs, attention's outputs and      -                 a second forward without these
                         every second matrix product
    offload              the last unit's, and two in transfer     all others        bytes to the host and back
    checkpoint_offload   the last unit's inputs                   other inputs      both
    partition            1/n of the inputs                        -                 checkpoint's, and gathers
    partition_offload    1/n of the last unit's inputs            1/n of others     all of these

(ZeRO, arXiv 1910.02054, section 6.1; the last two are P_a and P_a+cpu, over the n ranks that share a model, as in
offload.py; checkpointing: Chen et al., arXiv 1604.06174; `selective`: by operators, as in torchtitan.) The last
unit's tensors stay on the device: backward reads them first, and would have to wait for them.

A policy wraps the units' `forward`, so hooks on the units run outside of it: a strategy that is applied later gathers a
unit's parameters before backward reaches the unit, and so before its recomputation. If a unit is wrapped twice, the
inner wrapper acts first: the tensors that checkpointing saves (the inputs) are the ones that are offloaded. A copy of
the module has plain forwards.

Selective recomputation keeps the outputs of operators that are expensive to recompute; norms, activation functions and
the products between cost bandwidth more than arithmetic (torchtitan's `selective_ac_option = "op"`; Korthikanti et al.,
arXiv 2205.05198, section 5, recompute only attention's core, which fused kernels already do).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..modules.wrapping import blocks, inside_backward, saved_by_others
from .offload import ActivationPartition, Offloader, SlotSwapper

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
"""Matrix products of linear layers without and with a bias."""

ATTENTION = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
"""Kernels of scaled_dot_product_attention in torch.ops.aten."""

KEPT = frozenset(getattr(torch.ops.aten, name).default for name in ATTENTION)


def contexts() -> Any:
    """Returns the contexts of a unit's forward and of its recomputation, for torch.utils.checkpoint."""
    products = {False: 0, True: 0}  # so far in the forward, and in its recomputation, which repeats the decisions

    def decide(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        products[context.is_recompute] += operator in PRODUCTS
        keeps = products[context.is_recompute] % 2 == 1 if operator in PRODUCTS else operator in KEPT
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


Forward = Callable[..., Any]

LEAST_BYTES = 64 * 1024
"""Size in bytes below which a copy costs more than it saves."""


@dataclass(frozen=True)
class ActivationPolicy:
    """A policy for units. `recompute`: keeps only their inputs; `selective`: also outputs that are expensive to
    recompute. `keep`: where saved tensors are stored, a key of KEEPERS or "device". `partition`: each rank that shares
    the model keeps a part. `least_bytes`: smaller storages are never moved.
    """

    recompute: bool = False
    selective: bool = False
    keep: str = "device"
    partition: bool = False
    least_bytes: int = LEAST_BYTES


POLICIES: dict[str, ActivationPolicy] = {
    "none": ActivationPolicy(),
    "checkpoint": ActivationPolicy(recompute=True),
    "selective": ActivationPolicy(recompute=True, selective=True),
    "offload": ActivationPolicy(keep="host"),
    "checkpoint_offload": ActivationPolicy(recompute=True, keep="host"),
    "partition": ActivationPolicy(recompute=True, partition=True),
    "partition_offload": ActivationPolicy(recompute=True, keep="host", partition=True),
}
"""Name in the configuration -> policy."""


class Keeper(Protocol):
    """Stores the saved tensors of units outside of autograd."""

    def run(self, unit: nn.Module, name: str, is_last: bool, forward: Callable[[], Any]) -> Any:
        """Runs the forward of a unit and returns its result."""


KEEPERS: dict[str, Callable[[int], Keeper]] = {"host": Offloader, "slab": SlotSwapper}
"""Name -> constructor, from the smallest storage to move in bytes. With "device" autograd keeps everything."""


class Wrapped:
    """A wrapper around a module's forward. A copy of the module has its plain forward."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Runs the forward."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, (self.forward,)


class Recomputed(Wrapped):
    """A forward that is recomputed in backward with the same random numbers; if `selective`, only in part."""

    def __init__(self, forward: Forward, selective: bool) -> None:
        super().__init__(forward)
        self._how: dict[str, Any] = {"context_fn": contexts} if selective else {}

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        return checkpoint(self.forward, *inputs, use_reentrant=False, **self._how, **named_inputs)


class OffloadedForward(Wrapped):
    """A forward whose saved tensors go to `keeper`, unless other saved-tensor hooks are active. Recomputation around a
    unit has such hooks: it matches saved tensors by position, so removing some would mismatch the rest.
    """

    def __init__(self, forward: Forward, keeper: Keeper, unit: nn.Module, name: str, is_last: bool) -> None:
        super().__init__(forward)
        self._run = partial(keeper.run, unit, name, is_last)

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        if not torch.is_grad_enabled() or inside_backward() or saved_by_others():
            return self.forward(*inputs, **named_inputs)
        return self._run(partial(self.forward, *inputs, **named_inputs))


def _plain(forward: Forward) -> Forward:
    return forward


def recompute(unit: nn.Module, selective: bool = False) -> None:
    """Makes `unit` keep only its inputs for the backward, and if `selective` the outputs of KEPT and PRODUCTS."""
    unit.forward = Recomputed(unit.forward, selective)


def apply(model: nn.Module, policy: ActivationPolicy, mesh: DeviceMesh | None = None) -> None:
    """Puts the model's units under `policy`, before a strategy wraps the model. `mesh`: the ranks that share it. Raises
    ValueError for a model without units.
    """
    if not policy.recompute and not policy.partition and policy.keep not in KEEPERS:
        return
    units = blocks(model)
    if not units:
        raise ValueError(
            f"activation: {type(model).__name__} has no blocks to apply it to; put them into an nn.ModuleList or an"
            " nn.Sequential, or use activation=none"
        )
    keeper = KEEPERS[policy.keep](policy.least_bytes) if policy.keep in KEEPERS else None
    if policy.partition:
        keeper = Offloader(policy.least_bytes, partition=ActivationPartition(mesh), moves=policy.keep == "host")
    for number, (name, unit) in enumerate(units):
        if policy.recompute or policy.selective:
            recompute(unit, policy.selective)
        if keeper is not None:
            unit.forward = OffloadedForward(unit.forward, keeper, unit, name, is_last=number == len(units) - 1)
