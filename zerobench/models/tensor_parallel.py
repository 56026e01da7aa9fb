"""Tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3): the matrices of a block, cut over n ranks.

A block has two pairs of matrices. In each pair the first is cut by outputs, the second by inputs; H is the width::

    attention_in    (3H/n, H)    queries, keys and values of a rank's own heads
    attention_out   (H, H/n)
    mlp_in          (4H/n, H)
    mlp_out         (H, 4H/n)

The first one's bias is cut as well. Everything else is whole on every rank: the second one's bias, norms, embeddings,
head, and activations between blocks. These stay equal, since their gradients are. Parameters are plain tensors, a
rank's own part; DTensors are used only at the borders of a pair, where they determine the collective::

                    forward                        backward
    entered         the tensor itself              all-reduce of the gradient's parts
    left            all-reduce of the sum's parts  the gradient itself

Two all-reduces of (B, S, H) in forward, two in backward. The ranks of a pair are consecutive; ranks with the same index
form the data-parallel group that an engine gets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from ..sections import known


@dataclass(frozen=True)
class TensorAxis:
    """The ranks that share a block's matrices, and this rank's index among them. `mesh` has these ranks, `data_group`
    the ranks with the same part of the model. Both are None in a model that is built only for its shapes.
    """

    ranks: int
    index: int = 0
    mesh: DeviceMesh | None = None
    data_group: dist.ProcessGroup | None = None

    @staticmethod
    def connect(ranks: int, device: str) -> TensorAxis:
        """Creates the groups of both axes. Collective over all ranks."""
        world = dist.get_world_size()
        models = [[*range(first, first + ranks)] for first in range(0, world, ranks)]
        replicas = [[*range(index, world, ranks)] for index in range(ranks)]
        group, data_group = (dist.new_subgroups_by_enumeration(groups)[0] for groups in (models, replicas))
        assert group is not None
        # a mesh that makes its own groups might choose NCCL over gloo
        return TensorAxis(ranks, dist.get_rank() % ranks, DeviceMesh.from_group(group, device), data_group)

    def entered(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x`, which all ranks have, for a matrix that is cut by outputs."""
        from torch.distributed.tensor import DTensor, Partial, Replicate  # most of a second, for those who use it

        whole = DTensor.from_local(x, known(self.mesh), [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    def left(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the ranks' `x`, outputs of a matrix that is cut by inputs."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        part = DTensor.from_local(x, known(self.mesh), [Partial()], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local()


class OutputsCut(nn.Module):
    """A rank's outputs of a Linear, (..., in) -> (..., out/n). `parts`: number of parts, each cut by itself."""

    def __init__(self, whole: nn.Linear, axis: TensorAxis, parts: int = 1) -> None:
        super().__init__()
        self.weight = _part(whole.weight, axis, 0, parts)
        self.bias = _part(whole.bias, axis, 0, parts)
        self._axis = axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., in) to (..., out/n)."""
        return F.linear(self._axis.entered(x), self.weight, self.bias)


class InputsCut(nn.Module):
    """A Linear over a rank's inputs, summed over the ranks: (..., in/n) -> (..., out)."""

    def __init__(self, whole: nn.Linear, axis: TensorAxis) -> None:
        super().__init__()
        self.weight = _part(whole.weight, axis, 1)
        self.bias = whole.bias
        self._axis = axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., in/n) to (..., out)."""
        return self._axis.left(F.linear(x, self.weight)) + self.bias


def _part(whole: torch.Tensor, axis: TensorAxis, dim: int, parts: int = 1) -> nn.Parameter:
    """Returns this rank's part of each of the `parts` of `whole` along `dim`, in its own memory."""
    own = whole.detach().unflatten(dim, (parts, axis.ranks, -1)).select(dim + 1, axis.index)
    return nn.Parameter(own.flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format))
