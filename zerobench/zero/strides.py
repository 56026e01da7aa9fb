"""The memory order of a parameter's elements, preserved so that a shard is computed with the whole parameter's kernels.

A flat buffer holds a parameter's elements in the order of its own memory: channels-last convolutions and transposed
matrices keep their strides, and with them their kernels and, on some CPUs, their rounding. Every range of a parameter's
elements in this package (pieces, segments, chunks of a checkpoint) counts in that order, usually row-major.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class MemoryOrder:
    """Dense strides of a tensor of `shape`: its elements fill (numel,) elements of memory, without overlap."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> MemoryOrder:
        """Returns a dense tensor's own order; of others the order that torch preserves without gaps and repetitions."""
        return cls(tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride())

    @classmethod
    def from_dims(cls, shape: Sequence[int], dims: Sequence[int]) -> MemoryOrder:
        """Builds the order whose dimensions, from the slowest to the fastest, are `dims`, a permutation."""
        strides, step = [1] * len(shape), 1
        for d in reversed(dims):
            strides[d], step = step, step * shape[d]
        return cls(tuple(shape), tuple(strides))

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """The dimensions from the slowest to the fastest; those of size one, whose strides are arbitrary, first."""
        several = [d for d, size in enumerate(self.shape) if size > 1]
        return tuple(d for d in range(len(self.shape)) if d not in several) + tuple(
            sorted(several, key=lambda d: -self.strides[d])
        )

    @cached_property
    def is_row_major(self) -> bool:
        """True where elements are ordered as in a contiguous tensor."""
        several = [d for d in self.dims if self.shape[d] > 1]
        return 0 in self.shape or several == sorted(several)

    def agrees(self, other: MemoryOrder) -> bool:
        """Returns True where both orders agree, ignoring the strides of dimensions of size one."""
        return self.shape == other.shape and (self.dims == other.dims or (self.is_row_major and other.is_row_major))

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the elements of a tensor of `shape` in this order, (numel,), contiguous; a view where possible."""
        return (tensor if self.is_row_major else tensor.permute(self.dims)).reshape(-1).contiguous()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the view of `flat`, (numel,), that has `shape` and `strides`."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset())
