"""The attributes that an engine shares with its module and optimizer, and its errors for those that it lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from . import labels
from .engine import ShardedEngine

SHOWN = {
    labels.PARAMETERS: "parameters",
    labels.GRADIENTS: "gradients",
    labels.MASTER: "masters",
    labels.OPTIMIZER: "optimizer states",
}
"""Category of an engine's tensors -> its name in the engine's description."""


class ModuleMixin(ShardedEngine):
    """The methods of `Strategy` that mirror nn.Module's. `name`: the strategy's name in `initialize`."""

    name = ""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The module's parameters. Under zero3 shapes are full, and values are present while a unit is gathered."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters with their names."""
        return self.module.named_parameters()

    def buffers(self) -> Iterator[torch.Tensor]:
        """The module's buffers, whole on every rank."""
        return self.module.buffers()

    @property
    def training(self) -> bool:
        """The module's training mode."""
        return self.module.training

    def train(self, mode: bool = True) -> Any:
        """Sets the module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Any:
        """Sets the module's evaluation mode."""
        return self.train(False)

    def __repr__(self) -> str:
        labeled: list[tuple[Any, str]] = [(parameter, labels.PARAMETERS) for parameter in self.module.parameters()]
        labeled += [(held.tensor, held.category) for held in self.held_tensors()]
        for state in self.optimizer.state.values():
            labeled += [(value, labels.OPTIMIZER) for value in state.values()] if isinstance(state, dict) else []
        # in memory, in all tiers; each storage counts once
        category_of = {tensor.untyped_storage(): category for tensor, category in labeled if torch.is_tensor(tensor)}
        sizes: Counter[str] = Counter()
        for storage, category in category_of.items():
            sizes[category] += storage.nbytes()
        parts = ", ".join(f"{name} {sizes[category]:,}" for category, name in SHOWN.items())
        psi = sum(p.numel() for p in self.trainable)
        return (
            f"{self.name} of {type(self.module).__name__}: ψ = {psi:,}, N = {self.comm.size}, rank {self.comm.rank}"
            f" holds {sum(sizes[category] for category in SHOWN):,} bytes now ({parts})"
        )

    def __deepcopy__(self, _: Any) -> NoReturn:
        raise TypeError(
            "deepcopy: an engine has a part on every rank and cannot be copied; copy engine.module inside `with"
            " engine.full_parameters()`, which gives a plain module, or keep engine.state_dict()"
        )

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(
            "an engine cannot be pickled or copied: it has a part on every rank; use engine.save(path),"
            " engine.state_dict() or engine.full_state_dict()"
        )

    @property
    def param_groups(self) -> NoReturn:
        """Raises AttributeError: an engine is not an optimizer, and torch's GradScaler would mistake it for one."""
        raise AttributeError(
            "param_groups: use engine.optimizer.param_groups; if a GradScaler asked for them: the engine scales losses"
            " itself, with loss_scaling=zerobench.zero.LossScaling()"
        )

    @property
    def join_hook(self) -> NoReturn:
        """Raises AttributeError: torch's Join asks for it, and an engine cannot step on only some ranks."""
        raise AttributeError(
            "join_hook: torch's Join is for unequal numbers of batches, but every rank takes part in every step of an"
            " engine; give all ranks as many batches (drop_last=True of DistributedSampler or DataLoader)"
        )
