"""The optimizer's view of the shards: one segment (parameter ∩ shard) per parameter.

One flat tensor as *the* parameter would be simpler but wrong: parameters without a gradient would decay and count
steps, and parameter groups would lose their meaning. Segments preserve both.

`guard` rejects uses of such an optimizer as one of whole parameters.

[Note: facts]
Facts are an optimizer's values besides the states of parameters: numbers in its groups and attributes.

    read      returns the current facts
    put       restores facts that were read, and deletes newer ones
    changed   compares two readings

A fact is a number, a text, a tuple of them, or a tensor of one element, which stays the same tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from functools import partial, wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn, optim

from .. import labels
from ..comm.base import Comm
from ..layout import MemoryOrder, Segment
from ..low_bit import AdamW8bit, AdamWBf16, block_of
from ..modules.wrapping import in_normal_mode
from ..offload.placement import ShardRange
from ..precision import IS_PART, Share, shaped_as
from ..units.bucket import GradientBucket
from .owned import OWNED, says_who_owns

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
    parameter (owned.py), whose segment is the whole parameter, has the shape and strides of its `order`.
    """

    def __init__(
        self, shard_range: ShardRange, segment: Segment, bucket: GradientBucket, ndim: int, order: MemoryOrder
    ) -> None:
        flat = shard_range.segment(segment.offset, segment.numel)
        is_owned = shard_range.unit.layout.sizes is not None
        super().__init__(order.view(flat) if is_owned else flat.view(*[1] * (ndim - 1), segment.numel))
        self.shard_range, self.unit, self.bucket = shard_range, shard_range.unit, bucket
        self.segment = segment
        self.tier = shard_range.tier
        self.used = False
        self._gradient: torch.Tensor | None = None  # a view of the bucket's shard, a permanent tensor without a sink

    def gradient(self) -> torch.Tensor | None:
        if self.used and (self._gradient is None or self.bucket.sink is not None):
            self._gradient = self.bucket.segment(self.segment.offset, self.segment.numel)
        return self._gradient if self.used else None

    @property
    def rounded(self) -> torch.Tensor | None:
        shard_range, numel = self.shard_range, self.segment.numel
        return None if shard_range.is_parameters else self.unit.parameter_shard.narrow(0, self.segment.offset, numel)

    @property
    def gradient_tier(self) -> str:
        """The tier of its gradient."""
        return self.bucket.tier_of(self.segment.offset)

    @property
    def crosses(self) -> bool:
        return self.tier != self.gradient_tier

    @property
    def unit_name(self) -> str:
        return self.unit.name


def dimensions(optimizer: optim.Optimizer, parameter: nn.Parameter) -> int:
    """Returns the number of dimensions of a parameter's segments: the parameter's, at least 1; 1 for optimizers of
    torch, which ignore it.
    """
    return 1 if type(optimizer) in ELEMENTWISE else max(1, parameter.dim())


def check_type(optimizer: object) -> None:
    """Raises ValueError for anything but one optimizer."""
    if isinstance(optimizer, optim.Optimizer):
        return
    what = f"it is a {type(optimizer).__name__}; give one torch.optim optimizer over model.parameters()"
    if optimizer is None:
        what = (
            "it is None; for inference alone freeze the model (`model.requires_grad_(False)`), and give an optimizer"
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
    """Raises ValueError for an optimizer that cannot be sharded.

    `trainable`: the module's unique trainable parameters and their names. `elementwise`: the caller asserts that an
    optimizer from outside torch is elementwise.
    """
    kind = type(optimizer)
    why, cuts = why_not_sharded(kind.__name__), not all(group.get(OWNED) for group in optimizer.param_groups)
    if kind not in ELEMENTWISE and not elementwise and (not says_who_owns(optimizer) or (why and cuts)):
        why = why or "only torch.optim's elementwise optimizers are known to be shardable"
        known = ", ".join(k.__name__ for k in ELEMENTWISE)
        raise ValueError(
            f"optimizer: {kind.__name__} cannot be sharded: {why}; use one of {known}, or zerobench.zero.MuonWithAdamW"
            " (or pass elementwise=True for one of your own whose update is elementwise; if it needs whole matrices,"
            " give each of its groups owned=True, or False)"
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
    """Raises ValueError, on all ranks, if their states of an optimizer that has stepped differ; otherwise collective
    only for such an optimizer.
    """
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
    """Returns a number that depends on the bits of a state, and on no order of summation."""
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
    """Gives the groups of `waiting` parameters this rank's segments in place of those that are in `index`.

    `index`: each trainable parameter's number; `orders`: the order of its elements, in which segments count. States, if
    there are any, are cut to the segments. Frozen parameters keep waiting: the optimizer would skip them anyway.
    """
    by_parameter: dict[int, list[OptimizerSegment]] = {}
    for segment in segments:
        by_parameter.setdefault(segment.segment.parameter, []).append(segment)
    for parameter in [p for p in waiting if p in index]:
        group, whole = waiting.pop(parameter)
        for segment in by_parameter.get(index[parameter], []):
            group["params"].append(segment.tensor)
            if whole:
                part = _cut_state(optimizer, whole, parameter, orders[parameter], segment)
                optimizer.state[segment.tensor] = part


def _cut_state(
    optimizer: optim.Optimizer, state: dict[str, Any], parameter: nn.Parameter, order: MemoryOrder,
    segment: OptimizerSegment,
) -> dict[str, Any]:  # fmt: skip
    """Returns the segment's part of the `state` of a whole parameter, copied."""
    own, start, stop = segment.tensor, segment.segment.start, segment.segment.stop

    def cut(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_flat, block = name in getattr(optimizer, "dtypes", ()), block_of(optimizer, name)  # low_bit.py
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
    """Makes `optimizer.step()` do `engine.step()`, which calls the optimizer's own; a scheduler's wrapper stays known
    as one, by its attributes.
    """
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
    """Makes `optimizer` reject the states of a plain run and of other ranks, and own the states that it loads."""
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
        raise _refusal("the states are those of rank {} of {}, and this is rank {} of {}".format(*owner, *own))
    groups = zip(saved["param_groups"], optimizer.param_groups, strict=False)
    for number, (theirs, ours) in enumerate(groups):
        given, mine = theirs["params"], ours["params"]
        if len(given) != len(mine):
            raise _refusal(f"group {number} has {len(given)} parameters and this optimizer's {len(mine)} segments")
        for key, segment in zip(given, mine, strict=True):
            for name, value in _tensors_of(optimizer, saved["state"].get(key, {})):
                wanted = segment.shape if (block := block_of(optimizer, name)) == 1 else (-(-len(segment) // block),)
                if value.shape != wanted:
                    words = f"{name!r} of parameter {key} is {tuple(value.shape)}, and here {tuple(wanted)}"
                    raise _refusal(words)


@in_normal_mode
def _own_states(optimizer: optim.Optimizer) -> None:
    """Copies loaded states that were made in inference mode, which no later step could update."""
    for state in filter(lambda one: isinstance(one, dict), optimizer.state.values()):
        made = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.is_inference()}
        state.update({name: value.clone() for name, value in made.items()})


def _tensors_of(optimizer: optim.Optimizer, state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Returns the states with an element for each element of the parameter."""
    found = [(name, value) for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim()]
    return found if type(optimizer) in ELEMENTWISE else []


def _refusal(found: str) -> ValueError:
    return ValueError(
        f"optimizer.load_state_dict: {found}; the engine's optimizer takes what its own state_dict gave on the same"
        " rank, stage and N, not a plain run's states; every rank saves its own, or all call engine.save(path) and"
        " engine.load(path), for any stage and N"
    )


ATTRIBUTES, STATE = "attributes", "state"
_SIMPLE = (bool, int, float, complex, str, type(None))


class Fact(NamedTuple):
    """`held`: the optimizer's value; `value`: the same, or a copy of a tensor."""

    held: Any
    value: Any

    def equals(self, other: Fact) -> bool:
        """Returns True if the values are equal; NaN equals NaN."""
        mine, others = self.value, other.value
        if isinstance(mine, torch.Tensor) and isinstance(others, torch.Tensor):
            return torch.equal(mine, others) or bool(mine.isnan().all() and others.isnan().all())
        return type(mine) is type(others) and bool(mine == others or (mine != mine and others != others))


Facts = dict[tuple[int | str, str], Fact]
"""(number of a group, or ATTRIBUTES or STATE; key) -> its fact."""


def read(optimizer: optim.Optimizer) -> Facts:
    """Returns all facts of an optimizer."""
    return {
        (place, key): Fact(held, held.detach().clone() if isinstance(held, torch.Tensor) else held)
        for place, mapping in _places(optimizer).items()
        for key, held in mapping.items()
        if isinstance(key, str) and _is_fact(held)
    }


def put(optimizer: optim.Optimizer, facts: Facts) -> None:
    """Sets the optimizer's facts to `facts`."""
    places = _places(optimizer)
    for place, key in read(optimizer).keys() - facts.keys():
        del places[place][key]
    for (place, key), fact in facts.items():
        places[place][key] = fact.held
        if isinstance(fact.held, torch.Tensor):
            fact.held.detach().copy_(fact.value)


def changed(before: Facts, after: Facts) -> Facts:
    """Returns the entries of `after` that are new or different."""
    return {at: fact for at, fact in after.items() if at not in before or not fact.equals(before[at])}


def follow(optimizer: optim.Optimizer, before: Facts, after: Facts) -> None:
    """Applies changes by another optimizer, which started with `before`, except to facts that were changed here too."""
    if type(optimizer) in ELEMENTWISE:
        return
    mine = read(optimizer)
    moved = changed(before, mine)
    news = {at: fact for at, fact in changed(before, after).items() if at not in moved}
    for at, fact in news.items():
        if at in mine and isinstance(mine[at].held, torch.Tensor):
            news[at] = Fact(mine[at].held, fact.value)
    put(optimizer, mine | news)


class FactsOfParts:
    """An update in parts, each of which starts with the same facts; changes by any part are in effect at the end.

    torch's own optimizers change no facts, and are skipped.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_asked = type(optimizer) not in ELEMENTWISE
        self._changes: Facts = {}
        self._before: Facts = {}

    def begin(self) -> None:
        """Starts the first part."""
        if self._is_asked:
            self._before = read(self._optimizer)

    def end_part(self) -> None:
        """Ends a part, before another. Raises RuntimeError if two parts disagree."""
        if self._is_asked:
            self._note()
            put(self._optimizer, self._before)

    def end(self) -> None:
        """Ends the last part."""
        if self._is_asked:
            self._note()
            put(self._optimizer, self._before | self._changes)

    def _note(self) -> None:
        for at, fact in changed(self._before, read(self._optimizer)).items():
            known = self._changes.setdefault(at, fact)
            if not known.equals(fact):
                raise RuntimeError(
                    f"optimizer: {type(self._optimizer).__name__} changed {at[1]!r} to {known.value} by some parameters"
                    f" and to {fact.value} by others; an update that mixes parameters cannot be sharded"
                )


def _places(optimizer: optim.Optimizer) -> dict[int | str, dict[Any, Any]]:
    return {**dict(enumerate(optimizer.param_groups)), ATTRIBUTES: vars(optimizer), STATE: optimizer.state}


def _is_fact(held: Any) -> bool:
    if isinstance(held, torch.Tensor):
        return held.numel() == 1
    return all(isinstance(one, _SIMPLE) for one in held) if isinstance(held, tuple) else isinstance(held, _SIMPLE)
