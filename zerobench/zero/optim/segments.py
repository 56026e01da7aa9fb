"""The optimizer's view of the shards: one segment (parameter ∩ shard) a parameter.

One flat tensor as *the* parameter would be simpler and wrong: parameters without a gradient would decay
and count steps, and parameter groups would lose their meaning. Segments keep both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn, optim

from ..gradients.bucket_base import GradientBucket
from ..layout import Segment
from ..offload.placement import ShardRange
from ..precision import Share
from ..strides import MemoryOrder

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam,
    optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
"""Optimizers whose update of an element depends on that element alone, so that a shard can be updated apart."""

_REASONS = {
    "LBFGS": "its line search and history mix all parameters",
    "Adafactor": "it factors each matrix's second moment over whole rows and columns",
    "Muon": "it orthogonalizes whole matrices",
    "SparseAdam": "it takes sparse gradients, which flat buffers do not hold",
}


class OptimizerSegment(Share):
    """A segment as the optimizer holds it: `tensor` is a view of the master of a range of its unit's shard.

    It has `ndim` dimensions, all of size 1 but the last, for rules such as "decay if p.ndim >= 2".
    """

    def __init__(self, shard_range: ShardRange, segment: Segment, bucket: GradientBucket, ndim: int) -> None:
        flat = shard_range.segment(segment.offset, segment.numel)
        super().__init__(flat.view(*[1] * (ndim - 1), segment.numel))
        self.shard_range, self.unit, self.bucket = shard_range, shard_range.unit, bucket
        self.segment = segment
        self.tier = shard_range.tier
        self.used = False

    def gradient(self) -> torch.Tensor | None:
        return self.bucket.segment(self.segment.offset, self.segment.numel) if self.used else None

    @property
    def gradient_tier(self) -> str:
        """Where its gradient lies."""
        return self.bucket.tier_of(self.segment.offset)

    @property
    def crosses(self) -> bool:
        return self.tier != self.gradient_tier

    @property
    def unit_name(self) -> str:
        return self.unit.name


def dimensions(optimizer: optim.Optimizer, parameter: nn.Parameter) -> int:
    """Returns the number of dimensions of a parameter's segments: its own, and at least 1; 1 for optimizers of torch,
    which do not ask.
    """
    return 1 if type(optimizer) in ELEMENTWISE else max(1, parameter.dim())


def check_optimizer(optimizer: optim.Optimizer, trainable: dict[nn.Parameter, str], elementwise: bool) -> None:
    """Refuses an optimizer that cannot be sharded. Raises ValueError with one sentence.

    `trainable`: the module's unique trainable parameters and their names. `elementwise`: the caller
    vouches for an optimizer that is not torch's.
    """
    kind = type(optimizer)
    if kind not in ELEMENTWISE and not elementwise:
        why = _REASONS.get(kind.__name__, "only torch.optim's elementwise optimizers are known to be shardable")
        known = ", ".join(k.__name__ for k in ELEMENTWISE)
        raise ValueError(
            f"optimizer: {kind.__name__} cannot be sharded: {why}; use one of {known}"
            " (or pass elementwise=True for one of your own whose update is elementwise)"
        )
    held = {p for group in optimizer.param_groups for p in group["params"]}
    strangers = sum(p not in trainable and p.requires_grad for p in held)
    if strangers:
        raise ValueError(f"optimizer: it holds {strangers} trainable tensors that are not parameters of the model")
    for state in optimizer.state.values():
        if state and float(state.get("step", 1)) != 0:
            raise ValueError("optimizer: it has already taken a step; initialize() wants one that has not")


def swap_parameters(
    groups: Iterable[dict[str, Any]],
    state: dict[Any, Any],
    index: dict[nn.Parameter, int],
    segments: Iterable[OptimizerSegment],
    orders: dict[nn.Parameter, MemoryOrder],
) -> None:
    """Replaces the parameters of an optimizer's `groups` by this rank's segments, in place.

    `index`: each trainable parameter's number; `orders`: the order of its elements, in which segments count. `state`,
    the optimizer's, may exist before the first step (Adagrad's): it is cut to the segments. Frozen parameters leave
    the optimizer, which would skip them anyway.
    """
    by_parameter: dict[int, list[OptimizerSegment]] = {}
    for segment in segments:
        by_parameter.setdefault(segment.segment.parameter, []).append(segment)
    for group in groups:
        old, group["params"] = group["params"], []
        for parameter in old:
            whole = state.pop(parameter, None)
            for segment in by_parameter.get(index.get(parameter, -1), []):
                group["params"].append(segment.tensor)
                if whole:
                    state[segment.tensor] = _cut_state(whole, parameter, orders[parameter], segment)


def _cut_state(
    state: dict[str, Any], parameter: nn.Parameter, order: MemoryOrder, segment: OptimizerSegment
) -> dict[str, Any]:
    def cut(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if name != "step" and value.shape == parameter.shape:
                flat = order.flatten(value)[segment.segment.start : segment.segment.stop]
                value = flat.view(segment.tensor.shape).to(segment.tensor)
            elif value.device == parameter.device:
                value = value.to(segment.tensor.device)
            return value.clone()
        return value

    return {name: cut(name, value) for name, value in state.items()}
