"""Gradients as users read and change them, between backward and step: the part of `Strategy`'s interface for them.

[Note: the gradient that is read]
The engine stores the mean over all ranks, each rank its own segments, in the gradients' dtype. With loss scaling these
segments are scaled too; `full_gradient`, `set_full_gradient` and `gradient_norms` remove the loss scale and apply
clipping: they show the gradients that the optimizer gets. Segments have their factor in `scale`. Gradients kept back by
no_sync are not means yet: reading them raises an error. The counterparts are DeepSpeed's safe_get_full_grad and
safe_set_full_grad, and FSDP2's `.grad`, a DTensor: docs/how-to/gradients.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches

import torch
from torch import nn

from ..engine import ShardedEngine
from ..layout import MemoryOrder
from ..modules.wrapping import in_normal_mode
from ..optim.segments import OptimizerSegment
from ..precision import norm_over_ranks, sum_of_powers
from .flow import GradientFlow


@dataclass(frozen=True)
class GradientSegment:
    """This rank's gradient of elements [start, stop) of a parameter, counted in the order of its memory.

    `gradient`  (stop - start,) view, in the gradients' dtype: in-place writes to it take effect at the step
    `scale`     the factor by which it is multiplied on its way to the optimizer (unscaling, clipping); 0-dim or float
    """

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    gradient: torch.Tensor
    scale: torch.Tensor | float
    _order: MemoryOrder = field(repr=False)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns these elements, (stop - start,), of a tensor of the parameter's shape, such as a mask."""
        return self._order.flatten(whole)[self.start : self.stop]


class GradientMixin(ShardedEngine):
    """The part of an engine's interface for its gradients."""

    gradients: GradientFlow

    @in_normal_mode
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales the gradients so that their norm over all parameters and ranks is at most `max_norm`.

        Like torch.nn.utils.clip_grad_norm_ on the whole model, between `backward` and `step`. Returns the previous
        norm, 0-dim fp32, without the loss scale: NaN if any gradient has one. With `error_if_nonfinite` a norm that is
        not finite raises RuntimeError, and the gradients stay unchanged.
        """
        self.gradients.check_reduced("clip_grad_norm_")
        with torch.no_grad():
            self.update.agree("clip_grad_norm_")
            return self.update.scaling.clip(float(max_norm), float(norm_type), error_if_nonfinite)

    def gradient_segments(self) -> Iterator[GradientSegment]:
        """Yields this rank's segments of all existing gradients, to be read and changed in place; collective.

        Not every rank has a segment of every parameter; each element belongs to one rank (per shard group). A segment
        may be read and written until the next one is asked for. Change gradients before `clip_grad_norm_`, which uses
        the current values. Raises RuntimeError for gradients that were never reduced.
        """
        _begin(self, "gradient_segments")
        return _segments(self)

    @in_normal_mode
    def full_gradient(self, name: str) -> torch.Tensor | None:
        """Returns a parameter's whole gradient, on every rank, as the optimizer will get it; collective.

        It has the parameter's shape and its master's dtype; None if no rank has a gradient. `name`: as in
        `module.named_parameters()`. Raises ValueError if `name` is not a trainable parameter.
        """
        number = trainable_number(self, name)
        _begin(self, "full_gradient", self.names[number])
        with torch.no_grad():
            if number not in self.update.used:
                return None
            parameter = self.trainable[number]
            dtype = self.gradients.pieces[number][0][0].dtypes.master if parameter.numel() else parameter.dtype
            flat = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
            for segment in self.update.visited(lambda segment: segment.span.parameter == number):
                gradient = segment.gradient()
                assert gradient is not None
                flat[segment.span.start : segment.span.stop].copy_(gradient)
            self.comm.sum(flat)
            return self.orders[parameter].view(flat.mul_(self.update.scaling.pending))

    def set_full_gradient(self, name: str, value: torch.Tensor) -> None:
        """Sets a parameter's gradient to `value`, of the same shape; collective, with equal values on all ranks.

        `value` is the gradient that the optimizer is to get: the engine rounds it to the gradients' dtype and applies
        the loss scale. Raises ValueError for a wrong name or shape, RuntimeError if there is no gradient to replace.
        """
        number = trainable_number(self, name)
        if value.shape != self.trainable[number].shape:
            shapes = f"{tuple(value.shape)}, but the parameter's is {tuple(self.trainable[number].shape)}"
            raise ValueError(f"set_full_gradient: {name}: the value's shape is {shapes}")
        _begin(self, "set_full_gradient")
        if number not in self.update.used:
            raise RuntimeError(f"set_full_gradient: {name} has no gradient; run a backward that reaches it first")
        if self.update.scaling.coefficient is not None:
            raise RuntimeError("set_full_gradient: clip_grad_norm_ has been called; set gradients before it")
        with torch.no_grad():
            for segment in _segments(self, number):
                part = segment.part_of(value).to(segment.gradient.device)
                segment.gradient.copy_(part.double() / segment.scale)

    def reduced_gradients(self) -> Iterator[torch.Tensor]:
        """Yields this rank's part of the means over the ranks: (numel,) each, in the stored dtype and tier, still
        multiplied by the loss scale. Read a tensor before asking for the next. No collective, and nothing is changed.

        Ranks of one shard group yield different parts; replicas yield the same (`gradient_holders`).
        """
        return (gradient for _, gradient in self.reduced_segments())

    def reduced_segments(self) -> Iterator[tuple[OptimizerSegment, torch.Tensor]]:
        """Yields the optimizer's segments with `reduced_gradients`."""
        for bucket in self.gradients.buckets:
            bucket.wait_for_copies()
        used = self.update.used
        for tile in filter(None, self.update.tiles):
            # reduced, or on a single rank, which sends nothing, written
            present = [
                segment
                for segment in tile
                if (segment.span.parameter in used if segment.bucket.is_local else segment.bucket.is_reduced)
            ]
            before = [segment.used for segment in present]
            for segment in present:  # ranks agree on what was used in `step`; of a reduced unit all of it is present
                segment.used = True
            try:
                with tile[0].shard_range.gradients():
                    for segment in present:
                        gradient = segment.gradient()
                        assert gradient is not None
                        yield segment, gradient
            finally:
                for segment, was_used in zip(present, before, strict=True):
                    segment.used = was_used

    @property
    def gradient_holders(self) -> int:
        """Number of ranks with the same part of the gradients: replicas."""
        return self.comm.averaged_ranks // self.comm.size

    @in_normal_mode
    def gradient_norms(self, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
        """Returns the norm of each parameter's whole gradient, by name, 0-dim fp64, equal on all ranks; collective.

        The norms are of the gradients as the optimizer will get them; parameters without one are left out. Costs one
        small all-reduce.
        """
        _begin(self, "gradient_norms", f"norm_type {float(norm_type)}")
        with torch.no_grad():
            device = self.trainable[0].device if self.trainable else torch.device("cpu")
            totals = torch.zeros(len(self.trainable), dtype=torch.float64, device=device)
            for segment in self.update.visited(lambda segment: segment.used):
                gradient, total = segment.gradient(), totals[segment.span.parameter]
                assert gradient is not None
                part = sum_of_powers([gradient], float(norm_type), gradient.device).to(device)
                total.copy_(torch.maximum(total, part) if norm_type == math.inf else total + part)
            norms = norm_over_ranks(totals, float(norm_type), self.comm.sum, self.comm.maximum)
            norms = norms * self.update.scaling.pending
            return {self.names[i]: norms[i] for i in sorted(self.update.used)}


def _begin(engine: GradientMixin, what: str, sums: str = "") -> None:
    """Checks that gradients are reduced, and agrees on them. `sums` names the next sum: gloo aborts if sizes differ."""
    engine.gradients.check_reduced(what)
    if sums:
        engine.comm.meet(f"{what}, {sums}")
    engine.update.agree()


def trainable_number(engine: ShardedEngine, name: str) -> int:
    """Returns a trainable parameter's number. Raises ValueError for another name."""
    named = dict(engine.module.named_parameters(remove_duplicate=False))
    if name not in named:
        near = get_close_matches(str(name), list(named), n=1)
        raise ValueError(f"{name!r}: the module has no such parameter" + (f"; did you mean {near[0]}?" if near else ""))
    for number, parameter in enumerate(engine.trainable):
        if parameter is named[name]:
            return number
    raise ValueError(f"{name}: it was frozen when initialize() was called, and has no gradient")


def _segments(engine: GradientMixin, number: int | None = None) -> Iterator[GradientSegment]:
    """Yields the gradients of one parameter, or of all; a write is kept when the next gradient is asked for."""
    scale = engine.update.scaling.pending
    segments = engine.update.visited(lambda s: s.used and number in (None, s.span.parameter), edits=True)
    for segment in segments:
        piece, gradient = segment.span, segment.gradient()
        assert gradient is not None
        parameter, name = engine.trainable[piece.parameter], engine.names[piece.parameter]
        own_scale = scale.to(gradient.device) if isinstance(scale, torch.Tensor) else scale
        order = engine.orders[parameter]
        yield GradientSegment(name, parameter, piece.start, piece.stop, gradient, own_scale, order)
    engine.update.scaling.edited()
