"""The optimizer's view of the shards: one segment (parameter ∩ shard) per parameter.

One flat tensor as *the* parameter would be simpler but wrong: parameters without a gradient would decay and count
steps, and parameter groups would lose their meaning. Segments preserve both.

`guard` rejects calls that treat such an optimizer as one over whole parameters.

[Note: Owned]
Newton-Schulz, or another function of a whole matrix, needs all of it on one rank. With `owned=True` in a parameter
group, each of its matrices is *owned*: its gradient is reduced only to its owner, which updates it and sends the new
values to all. That is one reduction and one gather per matrix, with the volume of an elementwise optimizer: 2ψ under
stages 1 and 2, 3ψ under stage 3. Only the owner has the states, whole.

    owners    of all matrices, the costliest first, each to the rank with the least load so far (LPT; Graham 1969)
    segments  of an owned parameter: the whole parameter, in its own shape, on its owner, and none elsewhere

Groups with `owned=False` stay elementwise: their parameters may be cut anywhere. The same key makes the matrices of a
user's own optimizer, such as Shampoo or SOAP, owned.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from functools import partial, wraps
from math import prod
from types import MethodType
from typing import Any

import torch
from torch import nn, optim

from .. import labels
from ..bucket import GradientBucket
from ..comm.base import Comm
from ..layout import MemoryOrder, Segment
from ..low_bit import AdamW8bit, AdamWBf16, state_block
from ..modules.wrapping import in_normal_mode
from ..offload.placement import ShardRange
from ..precision import IS_PART, Share, shaped_as

OWNED = "owned"
"""The key in a parameter group: True if its parameters are owned, False if they are elementwise."""

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam,
    optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD, AdamW8bit, AdamWBf16,
)  # fmt: skip
"""Optimizers whose update of an element depends only on that element, or on its block of elements that no shard cuts,
so that a shard can be updated by itself."""

_REASONS = {
    "LBFGS": "its line search and history mix all parameters",
    **dict.fromkeys(("Adafactor", "CAME"), "it factors each matrix's second moment over whole rows and columns"),
    "Muon": "it orthogonalizes whole matrices, and takes no other parameters",
    "SparseAdam": "it takes sparse gradients, which flat buffers do not hold",
}


def why_not_sharded(name: str) -> str | None:
    """Returns the reason why an optimizer of this name cannot be sharded, or None if it is not a known one."""
    return {kind.lower(): why for kind, why in _REASONS.items()}.get(name.lower())


class OptimizerSegment(Share):
    """A segment as the optimizer sees it: `tensor` is a view of the master of a range of its unit's shard.

    It has `ndim` dimensions, all of size 1 except the last, for rules such as "decay if p.ndim >= 2"; an owned
    parameter, whose segment is the whole parameter, has the shape and strides of its `order`. `span`: where it is, in
    the parameter and in the shard.
    """

    def __init__(
        self, shard_range: ShardRange, segment: Segment, bucket: GradientBucket, ndim: int, order: MemoryOrder
    ) -> None:
        flat = shard_range.segment(segment.offset, segment.numel)
        is_owned = shard_range.unit.layout.sizes is not None
        super().__init__(order.view(flat) if is_owned else flat.view(*[1] * (ndim - 1), segment.numel))
        self.shard_range, self.unit, self.bucket = shard_range, shard_range.unit, bucket
        self.span, self.unit_name = segment, shard_range.unit.name
        self.tier, self.gradient_tier = shard_range.tier, bucket.tier_of(segment.offset)
        self.crosses = self.tier != self.gradient_tier
        self.used = False
        self._gradient: torch.Tensor | None = None  # a view of the bucket's shard, a permanent tensor without a sink

    def gradient(self) -> torch.Tensor | None:
        if self.used and (self._gradient is None or self.bucket.sink is not None):
            self._gradient = self.bucket.segment(self.span.offset, self.span.numel)
        return self._gradient if self.used else None

    @property
    def rounded(self) -> torch.Tensor | None:
        shard_range, numel = self.shard_range, self.span.numel
        return None if shard_range.is_parameters else self.unit.parameter_shard.narrow(0, self.span.offset, numel)


def dimensions(optimizer: optim.Optimizer, parameter: nn.Parameter) -> int:
    """Returns the dimensions of a parameter's segments: its own, at least 1; 1 for torch's optimizers."""
    return 1 if type(optimizer) in ELEMENTWISE else max(1, parameter.dim())


def check_type(optimizer: object) -> None:
    """Raises ValueError for anything but one optimizer."""
    if isinstance(optimizer, optim.Optimizer):
        return
    what = f"it is a {type(optimizer).__name__}; give one torch.optim optimizer over model.parameters()"
    if optimizer is None:
        what = (
            "it is None; for inference only, freeze the model (`model.requires_grad_(False)`), and give an optimizer"
            " over its parameters all the same, such as torch.optim.SGD(model.parameters())"
        )
    elif isinstance(optimizer, type):
        what = f"it is a class; give an optimizer of it, such as {optimizer.__name__}(model.parameters())"
    elif isinstance(optimizer, list | tuple | dict):
        what += ", with a parameter group for each set of options"
    elif callable(optimizer):
        what = "it is a function; call it yourself, and give the optimizer that it returns for model.parameters()"
    raise ValueError(f"optimizer: {what}")


def check_optimizer(
    optimizer: optim.Optimizer, trainable: dict[nn.Parameter, str], elementwise: bool,
    ignored: Collection[nn.Parameter] = (),
) -> None:  # fmt: skip
    """Raises ValueError for an optimizer that cannot be sharded. `trainable`: the module's unique trainable parameters
    and their names. `elementwise`: the caller asserts that an optimizer from outside torch is elementwise.
    """
    kind = type(optimizer)
    why, owned = why_not_sharded(kind.__name__), [group.get(OWNED) for group in optimizer.param_groups]
    unspecified = not all(isinstance(value, bool) for value in owned)
    if kind not in ELEMENTWISE and not elementwise and (unspecified or (why and not all(owned))):
        why = why or "only torch.optim's elementwise optimizers are known to be shardable"
        elementwise_names = ", ".join(k.__name__ for k in ELEMENTWISE)
        raise ValueError(
            f"optimizer: {kind.__name__} cannot be sharded: {why}; use one of {elementwise_names}, or"
            " zerobench.zero.MuonWithAdamW (or pass elementwise=True for one of your own whose update is elementwise;"
            " if it needs whole matrices, give each of its groups owned=True, or False)"
        )
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if held & {*ignored}:
        raise ValueError(
            "optimizer: it holds parameters of ignored_parameters=, which the engine leaves to you; give those an"
            " optimizer of their own"
        )
    strangers = sum(p not in trainable and p.requires_grad for p in held)
    if strangers:
        raise ValueError(f"optimizer: it holds {strangers} trainable tensors that are not parameters of the model")


def check_states(optimizer: optim.Optimizer, comm: Comm) -> None:
    """Raises ValueError, on all ranks, if the optimizer has stepped and its states differ between ranks."""
    states = [optimizer.state.get(p) or {} for group in optimizer.param_groups for p in group["params"]]
    if comm.size == 1 or not any(state and float(state.get("step", 1)) != 0 for state in states):
        return
    total = sum(sum(map(_bits, state.values())) * number for number, state in enumerate(states, 1)) % 2**62
    comm.meet("states of an optimizer that has stepped")
    device = comm.flags_device or next((p.device for g in optimizer.param_groups for p in g["params"]), None)
    ends = torch.tensor([total, -total], device=device)
    comm.maximum(ends)
    if ends.sum() != 0:
        raise ValueError(
            "optimizer: it has stepped, and its states differ between the ranks; load the same ones on every rank"
            " before initialize()"
        )


def _bits(value: Any) -> int:
    """Returns a checksum of a state's bits: a sum of integers, the same in any order of summation."""
    if not isinstance(value, torch.Tensor):
        return hash(value) if isinstance(value, int | float) else 0
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return int(value.detach().reshape(-1).contiguous().view(kind).sum(dtype=torch.int64))


Waiting = dict[nn.Parameter, tuple[dict[str, Any], dict[str, Any]]]
"""Whole parameter -> its group, and its state."""


def set_aside(optimizer: optim.Optimizer, groups: Iterable[dict[str, Any]]) -> Waiting:
    """Takes all parameters out of `groups`, and their states out of `optimizer`."""
    waiting: Waiting = {}
    for group in groups:
        waiting |= {p: (group, optimizer.state.pop(p, {})) for p in group["params"]}
        group["params"] = []
    return waiting


def swap_parameters(
    optimizer: optim.Optimizer, waiting: Waiting, index: dict[nn.Parameter, int],
    segments: Iterable[OptimizerSegment], orders: dict[nn.Parameter, MemoryOrder],
) -> None:  # fmt: skip
    """Replaces the `waiting` parameters that are in `index` by this rank's segments, in the same groups.

    `index`: each trainable parameter's number; `orders`: the order of its elements, in which segments count. States, if
    there are any, are cut to the segments. Frozen parameters keep waiting: the optimizer would skip them anyway.
    """
    by_parameter: dict[int, list[OptimizerSegment]] = {}
    for segment in segments:
        by_parameter.setdefault(segment.span.parameter, []).append(segment)
    for parameter in [p for p in waiting if p in index]:
        group, whole = waiting.pop(parameter)
        for segment in by_parameter.get(index[parameter], []):
            group["params"].append(segment.tensor)
            if whole:
                part = _cut_state(optimizer, group, whole, parameter, orders[parameter], segment)
                optimizer.state[segment.tensor] = part


def _cut_state(
    optimizer: optim.Optimizer, group: dict[str, Any], state: dict[str, Any], parameter: nn.Parameter,
    order: MemoryOrder, segment: OptimizerSegment,
) -> dict[str, Any]:  # fmt: skip
    own, start, stop = segment.tensor, segment.span.start, segment.span.stop

    def cut(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_meta:  # Adagrad's, which makes its states with the optimizer
            value = torch.full_like(value, group["initial_accumulator_value"], device=own.device)
        is_flat, block = name in getattr(optimizer, "dtypes", ()), state_block(optimizer, name)  # low_bit.py
        if is_flat:
            value = value[start // block : -(-stop // block)].to(own.device)
        elif name != "step" and value.shape == parameter.shape:
            dtype = own.dtype if value.dtype == parameter.dtype else value.dtype
            flat = order.flatten(value)[start:stop].to(own.device, dtype)
            return labels.label(shaped_as(own, flat).clone(), labels.OPTIMIZER, segment.unit_name, tier=segment.tier)
        elif value.device == parameter.device:
            value = value.to(own.device)
        return labels.label(value.clone(), labels.OPTIMIZER, segment.unit_name, tier=segment.tier)

    return {name: cut(name, value) for name, value in state.items()}


STEP = (
    "call engine.step(), or optimizer.step() of the optimizer that initialize() was given: a step that was kept from"
    " before, or another object's over the same groups, does not exchange the parameters"
)


def step_by(optimizer: optim.Optimizer, engine: Any) -> None:
    """Makes `optimizer.step()` do `engine.step()`, which calls its own; a scheduler's attributes stay."""
    own = optimizer.step

    @wraps(own)
    def step(_self: optim.Optimizer, *args: Any, **named: Any) -> Any:
        if engine.update.is_stepping:
            return own(*args, **named)
        _check_reader(optimizer)  # which takes a step first, if this rank has no state
        return engine.step(*args, **named)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


OWNER = "part_of_rank"
"""Key of an engine's optimizer's `state_dict`: (rank, N)."""


def guard(optimizer: optim.Optimizer, rank: int, size: int) -> None:
    """Makes `optimizer` reject states of a plain run or another rank, and copy loaded states made in inference mode."""
    optimizer.register_state_dict_post_hook(lambda _, saved: saved | {OWNER: (rank, size)})
    optimizer.register_load_state_dict_pre_hook(partial(_check_states, (rank, size)))
    optimizer.register_load_state_dict_post_hook(_own_states)
    optimizer.register_state_dict_pre_hook(_check_reader)
    for parameter in [p for group in optimizer.param_groups for p in group["params"]][:1]:
        optimizer.state.setdefault(parameter, {})  # without any state torch's functions would take a step


WHOLE_STATES = "torch.distributed.checkpoint.state_dict"
"""torch's module of functions that look for whole parameters in an optimizer."""


def _check_reader(_: optim.Optimizer) -> None:
    """Raises RuntimeError if torch's `get_optimizer_state_dict` reads the segments, which it cannot name."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_globals.get("__name__") == WHOLE_STATES:
            raise RuntimeError(f"get_optimizer_state_dict: the optimizer holds {IS_PART}")


def check_groups(optimizer: optim.Optimizer, updated_by: str) -> None:
    """Raises ValueError for group options that the engine's updates, on device type `updated_by`, do not support."""
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ValueError("optimizer: differentiable=True keeps the graph of an update, which shards have not")
        if group.get("capturable") and updated_by == "cpu":
            raise ValueError(
                "optimizer: capturable=True is for updates on a GPU, and here the CPU makes them; leave it out"
            )


def _check_states(own: tuple[int, int], optimizer: optim.Optimizer, saved: dict[str, Any]) -> None:
    """Raises ValueError if `saved` does not belong to this rank's segments. `own`: (rank, N)."""
    owner = tuple(saved.get(OWNER, own))  # as a file may have it, a list
    if owner != own:
        raise _state_error("the states are those of rank {} of {}, and this is rank {} of {}".format(*owner, *own))
    groups = zip(saved["param_groups"], optimizer.param_groups, strict=False)
    for number, (saved_group, group) in enumerate(groups):
        keys, segments = saved_group["params"], group["params"]
        if len(keys) != len(segments):
            raise _state_error(
                f"group {number} has {len(keys)} parameters and this optimizer's {len(segments)} segments"
            )
        for key, segment in zip(keys, segments, strict=True) if type(optimizer) in ELEMENTWISE else ():
            for name, value in saved["state"].get(key, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():  # one with an element for each of the parameter
                    block = state_block(optimizer, name)
                    shape = segment.shape if block == 1 else (-(-len(segment) // block),)
                    if value.shape != shape:
                        raise _state_error(
                            f"{name!r} of parameter {key} is {tuple(value.shape)}, and here {tuple(shape)}"
                        )


def _state_error(why: str) -> ValueError:
    return ValueError(
        f"optimizer.load_state_dict: {why}; the engine's optimizer takes what its own state_dict gave on the same"
        " rank, stage and N, not a plain run's states; every rank saves its own, or all call engine.save(path) and"
        " engine.load(path), for any stage and N"
    )


@in_normal_mode
def _own_states(optimizer: optim.Optimizer) -> None:
    """Copies loaded states that were made in inference mode, which no later step could update."""
    for state in optimizer.state.values():
        if isinstance(state, dict):
            inferred = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.is_inference()}
            state.update({name: value.clone() for name, value in inferred.items()})


# -- whole matrices (see the note) ---------------------------------------------------------------------------------


def muon_cost(shape: Sequence[int]) -> int:
    """Returns the multiplications and additions of one Newton-Schulz iteration on an (m, n) matrix, m ≤ n: X Xᵀ, its
    square, and the product with X: 4m²n + 2m³. Of a stack, (experts, m, n), those of all its matrices.
    """
    m, n = sorted(shape[-2:])
    return prod(shape[:-2]) * (4 * m * m * n + 2 * m**3)


def assign(costs: Sequence[int], ranks: int) -> list[int]:
    """Returns each matrix's owner: the costliest first, to the rank with the least load (ties: the lowest)."""
    loads, owner = [0] * ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owner[number] = rank = loads.index(min(loads))
        loads[rank] += costs[number]
    return owner


def owned_by(optimizer: optim.Optimizer) -> set[nn.Parameter]:
    """Returns the parameters in groups with `owned=True`."""
    return {p for group in optimizer.param_groups if group.get(OWNED) for p in group["params"]}


def owners_of(held: set[nn.Parameter], trainable: Iterable[nn.Parameter], ranks: int) -> dict[nn.Parameter, int]:
    """Returns the owners of `held`. Raises ValueError for one that is no matrix, nor a stack of matrices."""
    owned = [p for p in trainable if p in held and p.numel()]
    for parameter in owned:
        if parameter.dim() not in (2, 3):
            raise ValueError(
                f"optimizer: a parameter of shape {tuple(parameter.shape)} is in a group with owned=True, which is for"
                " matrices, and stacks of them"
            )
    return dict(zip(owned, assign([muon_cost(p.shape) for p in owned], ranks), strict=True))
