"""The engine as its gradients see it, so that imports run downwards only: strategy.py has the whole."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from ..comm.base import Comm
from ..layout import Piece, Segment
from ..protocols import UnitView
from ..strides import MemoryOrder
from .bucket_base import GradientBucket


class BucketUnit(UnitView, Protocol):
    """A trainable unit."""

    @property
    def gradients(self) -> GradientBucket:
        """Its bucket."""


class VisitedRange(Protocol):
    """A range of a unit's shard (offload/placement.py)."""

    def reading(self) -> AbstractContextManager[None]:
        """Inside, its gradients can be read."""

    def editing(self) -> AbstractContextManager[None]:
        """Inside, they can be changed."""


class SegmentView(Protocol):
    """A segment of the optimizer's (optim/segments.py). `used`: a gradient of its parameter has come."""

    tensor: nn.Parameter
    used: bool

    @property
    def segment(self) -> Segment:
        """Its elements."""

    @property
    def bucket(self) -> GradientBucket:
        """The bucket with its gradient."""

    @property
    def shard_range(self) -> VisitedRange:
        """The range that it is in."""

    def gradient(self) -> torch.Tensor | None:
        """The reduced gradient, where it lies; None where none has come."""


class ScalingView(Protocol):
    """Factors of gradients on their way to the optimizer (optim/loss_scaling.py)."""

    coefficient: torch.Tensor | float | None

    @property
    def pending(self) -> torch.Tensor | float:
        """The product of all that is known so far."""

    def edited(self) -> None:
        """Gradients may have been changed."""


class UpdateView(Protocol):
    """The update (optim/update.py). `used`: parameters, by number, whose gradients have come."""

    used: set[int]
    is_running: bool

    @property
    def scaling(self) -> ScalingView:
        """The loss scale, and clipping."""

    @property
    def segments(self) -> Sequence[SegmentView]:
        """All of this rank's."""

    @property
    def tiles(self) -> Sequence[Sequence[SegmentView]]:
        """Those that are updated together."""

    def agree(self) -> None:
        """The ranks agree on `used`."""

    def drop(self, numbers: set[int]) -> None:
        """These parameters have no gradients any more on this rank."""


class FlowView(Protocol):
    """The flow of gradients (gradients/flow.py)."""

    @property
    def buckets(self) -> Sequence[GradientBucket]:
        """Those of all units."""

    @property
    def pieces(self) -> Sequence[Sequence[tuple[BucketUnit, Piece]]]:
        """Of each trainable parameter."""

    def wait_all(self) -> None:
        """No reduction is in flight afterwards."""

    def check_reduced(self, what: str) -> None:
        """Raises RuntimeError where gradients were never reduced."""


class GradientEngine(Protocol):
    """The engine: `trainable` parameters, by number, and their `names`; `orders` of their elements."""

    module: nn.Module
    comm: Comm
    trainable: list[nn.Parameter]
    names: list[str]
    orders: dict[nn.Parameter, MemoryOrder]

    @property
    def units(self) -> Sequence[BucketUnit]:
        """The trainable units."""

    @property
    def gradients(self) -> FlowView:
        """Buckets and arrivals."""

    @property
    def update(self) -> UpdateView:
        """The optimizer over this rank's segments."""

    def zero_grad(self) -> None:
        """Drops all gradients."""


class ReducingEngine(GradientEngine, Protocol):
    """An engine that starts reductions as its stage wants them."""

    def gradients_written(self, unit: BucketUnit) -> None:
        """A parameter's gradients have all come, and are in `unit`."""

    def release_copied(self) -> None:
        """Copies of gradients to other tiers are waited for."""
