"""Linear layers of a block in other forms: with adapters (LoRA), and cut over ranks (tensor parallelism).

LoRA (Hu et al., arXiv 2106.09685): next to each frozen Linear a trained product of two thin matrices.

    y = W x + b + B (A x)    W (out, in), b (out,) frozen; A (rank, in) drawn like nn.Linear's weight; B (out, rank) 0

With B = 0 the model starts as the frozen one. The paper's scale, alpha / rank, is 1. Adapters are placed as in QLoRA
and peft's "all-linear": at every Linear of the blocks, not at the head. Everything else is frozen.

Tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3) has two pairs of matrices in a block. In each pair the
first is cut by outputs, the second by inputs; H is the width, n the number of ranks::

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

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from ..host.revisions import installed_version
from ..sections import known
from ..zero.modules.tiled_linear import TiledLinear


class LoRALinear(nn.Module):
    """A frozen Linear, tiled or not, with its adapter: (..., in) -> (..., out). The adapter has no values yet."""

    def __init__(self, base: nn.Linear | TiledLinear, rank: int) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, rank))
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., in) to (..., out)."""
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)  # type: ignore[no-any-return]


def initialize_adapter(module: nn.Module) -> None:
    """Initializes the adapter of `module`; leaves a module without one unchanged."""
    if isinstance(module, LoRALinear):
        nn.init.kaiming_uniform_(module.lora_a, a=math.sqrt(5))
        nn.init.zeros_(module.lora_b)


def base_linear(linear: nn.Module) -> nn.Module:
    """Returns the frozen part of a LoRALinear; for another module, the module itself."""
    return linear.base if isinstance(linear, LoRALinear) else linear


def add_adapters(model: nn.Module, blocks: nn.Module, rank: int) -> None:
    """Freezes `model`, and adds an adapter to every Linear in its `blocks`."""
    model.requires_grad_(False)
    for parent in list(blocks.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear | TiledLinear):
                setattr(parent, name, LoRALinear(child, rank))


def lora_problems(rank: int, hidden: int, where: str, by_peft: bool) -> list[str]:
    """Returns an error message if `rank` exceeds the width `hidden`, or if peft is needed but not installed."""
    if rank > hidden:
        width = f"{where}.hidden={hidden}; use 1 to {hidden}, or 0 for none"
        return [f"model.lora={rank}: an adapter's rank is at most the width, {width}"]
    if rank > 0 and by_peft and installed_version("peft") is None:
        return [f"model.lora={rank}: with model=huggingface it needs peft, which is not installed; pip install peft"]
    return []


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
    own = whole.detach().unflatten(dim, (parts, axis.ranks, -1)).select(dim + 1, axis.index)
    return nn.Parameter(own.flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format))
