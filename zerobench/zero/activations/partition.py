"""P_a (ZeRO, arXiv 1910.02054, section 6.1): inputs of units are partitioned over ranks that would all keep them whole.

Ranks that share a model have equal activations between its units. Each rank keeps such a saved tensor as ::

    part     1/n of its elements, flat, in its own memory: on the device, or offloaded by another keeper
    whole    gathered when backward reaches the unit, before the unit is recomputed

Small, uneven or strided tensors stay whole. Parts and wholes have the same bits: nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .. import labels

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Saved = Callable[[], torch.Tensor]
"""The object that autograd keeps instead of a tensor; called in backward, it rebuilds the tensor."""


class ActivationPartition:
    """Divides tensors over `mesh`, which has one axis, or is None for a model that does not run."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = mesh

    def divides(self, tensor: torch.Tensor) -> bool:
        """Returns True if all ranks can keep an equal part."""
        return self._mesh is not None and tensor.is_contiguous() and tensor.numel() % self._mesh.size() == 0

    def pack(self, tensor: torch.Tensor, name: str, keep: Callable[[torch.Tensor], Saved]) -> Saved:
        """Returns the object that rebuilds `tensor` from the ranks' parts; `keep` stores this rank's part."""
        from torch.distributed.tensor import DTensor, Replicate, Shard  # most of a second, for those who use it

        assert self._mesh is not None
        mesh, shape = self._mesh, tensor.shape
        everywhere = DTensor.from_local(tensor.detach().view(-1), mesh, [Replicate()], run_check=False)
        part = everywhere.redistribute(placements=[Shard(0)]).to_local()
        kept = keep(labels.label(part, labels.ACTIVATIONS, name))

        def whole() -> torch.Tensor:
            with torch.no_grad():
                flat = DTensor.from_local(kept(), mesh, [Shard(0)], run_check=False).full_tensor()
            return labels.label(flat, labels.ACTIVATIONS, name).view(shape)

        return whole
