"""ZeRO-1, P_os: the optimizer states are partitioned (ZeRO, arXiv 1910.02054, section 5.1).

All parameters of one group and dtype lie end to end in one flat buffer, all gradients in another. The
buffers are cut into constant-size buckets; each rank owns 1/N of every bucket::

    reduce    own slice of a bucket's gradients := mean over the ranks        ψ on the wire, as it fills
    update    the optimizer sees the own slices alone                         optimizer states: 1/N
    gather    the slices of the updated parameters go to everyone             ψ on the wire

In fp32: 4ψ parameters + 4ψ gradients + 8ψ/N optimizer states for Adam.
"""

from __future__ import annotations

import torch
from torch import nn, optim

from . import labels
from .comm import Comm
from .layout import buckets
from .strategy import Options, Strategy
from .unit import ALIGN_BYTES, Unit


class Stage1(Strategy):
    """Optimizer states partitioned."""

    stage = 1

    def __init__(self, module: nn.Module, optimizer: optim.Optimizer, comm: Comm, options: Options) -> None:
        self._next = 0  # how many buckets have been sent in the present backward
        self._carried: dict[Unit, torch.Tensor] = {}  # sums of earlier micro-batches, while a further one is reduced
        super().__init__(module, optimizer, comm, options)

    def adopt(self) -> None:
        for parameter in self.frozen:
            self.comm.broadcast(parameter.data)
        for number, indices in enumerate(self._indices_by_group()):
            self._adopt_group(number, indices)
        for unit in self.units:
            self.comm.broadcast(unit.full_parameters)
        self.label_units()

    def _indices_by_group(self) -> list[list[int]]:
        """Parameter numbers by (optimizer group, dtype, device), in the order in which gradients come: reversed."""
        groups = {p: g for g, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        found: dict[tuple[object, ...], list[int]] = {}
        for i, p in reversed(list(enumerate(self.trainable))):
            found.setdefault((groups[p], p.dtype, p.device), []).append(i)
        return list(found.values())

    def _adopt_group(self, number: int, indices: list[int]) -> None:
        like = self.trainable[indices[0]]
        align, bucket_numel = (n // like.element_size() for n in (ALIGN_BYTES, self.options.bucket_bytes))
        numels = [(i, self.trainable[i].numel()) for i in indices]
        layouts = buckets(numels, bucket_numel, self.comm.size, align)
        flat = like.new_zeros(sum(layout.padded_numel for layout in layouts))
        gradients = self.allocate_gradients(flat)
        start = 0
        for k, layout in enumerate(layouts):
            unit = Unit(f"group {number} bucket {k}", layout, self.comm)
            unit.full_parameters = flat.narrow(0, start, layout.padded_numel)
            unit.parameter_shard = unit.own_slice(unit.full_parameters)
            self.place_gradients(unit, gradients, start)
            self.units.append(unit)
            for piece in layout.pieces:
                if piece.start == 0:
                    parameter = self.trainable[piece.parameter]
                    self._move_into(flat.narrow(0, start + piece.offset, parameter.numel()), parameter)
            start += layout.padded_numel

    @staticmethod
    def _move_into(place: torch.Tensor, parameter: nn.Parameter) -> None:
        place.copy_(parameter.detach().reshape(-1))
        parameter.data = place.view(parameter.shape)

    # -- gradients stay whole: the reduction lands in the own slice of the bucket ----------------------

    def allocate_gradients(self, flat: torch.Tensor) -> torch.Tensor | None:
        """The group's flat gradient buffer, or None where a stage does not keep one."""
        return torch.zeros_like(flat)

    def place_gradients(self, unit: Unit, gradients: torch.Tensor | None, start: int) -> None:
        """Makes the unit's gradient tensors."""
        assert gradients is not None
        unit.full_gradients = gradients.narrow(0, start, unit.layout.padded_numel)
        unit.gradient_shard = unit.own_slice(unit.full_gradients)

    def open_gradients(self, unit: Unit) -> None:
        if unit.reduced:  # a further micro-batch: the sum so far steps aside
            self._carried[unit] = labels.label(unit.gradient_shard.clone(), labels.GRADIENTS, unit.name)

    def close_gradients(self, unit: Unit) -> None:
        if unit in self._carried:
            unit.gradient_shard.add_(self._carried.pop(unit))

    # -- buckets are sent in one order on all ranks, as they fill --------------------------------------

    def gradients_written(self, unit: Unit) -> None:
        while self._next < len(self.units) and self._is_full(self.units[self._next]):
            self.reduce(self.units[self._next])
            self._next += 1

    @staticmethod
    def _is_full(unit: Unit) -> bool:
        return len(unit.arrived) == len(unit.layout.pieces)

    def finish_reductions(self) -> None:
        sent, self._next = self._next, 0
        for unit in self.units[:sent]:
            if unit.filled and unit.reduction is None:  # gradients that came after the bucket was sent
                self.reduce(unit)
        for unit in self.units[sent:]:
            self.reduce(unit)

    def forget(self) -> None:
        self._next = 0
        self._carried.clear()

    def after_update(self) -> None:
        gathers = [self.comm.all_gather(unit.full_parameters, unit.name) for unit in self.units]
        for gather in gathers:
            gather.wait()
