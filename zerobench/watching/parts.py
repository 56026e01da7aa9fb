"""Parts of parameters that one rank updates, whatever the engine: named tensors, and the same part of a whole tensor.

plain, DDP    the whole parameter
FSDP2         this rank's shard of a DTensor
ours          a segment of the flat master: elements [start, stop) of a parameter
masters       tensors of the loop's own, next to the model: matched to the parameters by their order and shapes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from ..probes.labeling import parts_of
from ..zero.layout import MemoryOrder

WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts of a parameter's name that wrappers of a module add."""

OUTER = "module."
"""What nn.DataParallel and DDP put before every name; anywhere else it is a name of the user's own."""

Cut = Callable[[torch.Tensor], torch.Tensor | None]
"""Returns a rank's part of a whole tensor; None if the part is unknown."""


@dataclass(frozen=True)
class UpdatedPart:
    """This rank's part of the parameter `name`."""

    name: str
    tensor: torch.Tensor
    """The plain tensor that the optimizer updates."""
    key: torch.Tensor
    """The tensor in the optimizer's groups."""
    in_model: torch.dtype
    """The dtype of the parameter in the model."""
    cut: Cut


def names_in(model: nn.Module) -> dict[nn.Parameter, str]:
    """Returns the parameters with their names in the plain model."""
    names = {p: plain_name(name) for name, p in model.named_parameters()}
    while names and all(name.startswith(OUTER) for name in names.values()):
        names = {p: name.removeprefix(OUTER) for p, name in names.items()}
    return names


def plain_name(name: str) -> str:
    """Returns a parameter's name without the additions of wrappers."""
    for part in WRAPPED:
        name = name.replace(part, "")
    return name


def numel_of(parameter: nn.Parameter) -> int:
    """Returns the elements of the whole parameter; DeepSpeed keeps an empty one and its size."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def is_ours(engine: Any) -> bool:
    """Returns True for an engine of zerobench.zero, which has its tensors in segments."""
    return hasattr(engine, "label_held") and hasattr(engine, "reduced_gradients")


def parts_of_engine(engine: Any) -> Iterator[UpdatedPart]:
    """Yields the segments that one of our engines updates on this rank and has in memory."""
    for updated in (segment for tile in engine.update.tiles for segment in tile):
        segment, parameter = updated.segment, engine.trainable[updated.segment.parameter]
        if updated.tensor.untyped_storage().nbytes():
            cut = partial(_segment_of, engine.orders[parameter], segment.start, segment.stop)
            name = plain_name(engine.names[segment.parameter])
            yield UpdatedPart(name, updated.tensor, updated.tensor, parameter.dtype, cut)


def _segment_of(order: MemoryOrder, start: int, stop: int, whole: torch.Tensor) -> torch.Tensor:
    return order.flatten(whole)[start:stop]


def gradients_of_engine(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the names and reduced gradients of an engine's segments, multiplied by the loss scale."""

    def names() -> Iterator[str]:
        for updated in (segment for tile in engine.update.tiles for segment in tile):
            is_used = updated.segment.parameter in engine.update.used
            if is_used if updated.bucket.is_alone else updated.bucket.is_reduced:
                yield plain_name(engine.names[updated.segment.parameter])

    for gradient, name in zip(engine.reduced_gradients(), names(), strict=True):
        yield name, gradient


def held_by(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    """Returns the tensors in an optimizer's parameter groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def parts_of_optimizer(optimizer: optim.Optimizer, names: dict[nn.Parameter, str]) -> Iterator[UpdatedPart]:
    """Yields the parts that an optimizer of torch updates, without frozen parameters. `names`: of the model's."""
    held = [p for p in held_by(optimizer) if p.requires_grad or p not in names]
    # Masters are matched in their order, each to the next trainable parameter of its shape that the optimizer does not
    # hold; to none if any has no match.
    own = set(held)
    others = iter([p for p in names if p.requires_grad and p not in own])
    masters = {
        master: next((p for p in others if p.shape == master.shape), None) for master in held if master not in names
    }
    originals: dict[torch.Tensor, Any] = {} if None in masters.values() else masters
    for number, parameter in enumerate(held):
        original = originals.get(parameter, parameter)
        name = names.get(original, f"master {number}")
        yield UpdatedPart(
            name, next(parts_of(parameter.detach())), parameter, original.dtype, partial(_shard, parameter)
        )


def _shard(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor | None:
    """Cuts this rank's part from a whole tensor: for a DTensor, by its placements."""
    placements, mesh = getattr(parameter, "placements", ()), getattr(parameter, "device_mesh", None)
    if any(type(placement).__name__ not in ("Shard", "Replicate") for placement in placements):
        return None  # strided shards, of several axes
    for axis, placement in enumerate(placements):
        if mesh is not None and placement.is_shard():
            pieces, rank = whole.chunk(mesh.size(axis), placement.dim), mesh.get_local_rank(axis)
            whole = pieces[rank] if rank < len(pieces) else whole.narrow(placement.dim, 0, 0)
    return whole if whole.shape == next(parts_of(parameter)).shape else None
