"""The root's units: parameters of stage 3 that are in no other unit, such as an embedding, a last norm and a head.

They are whole from the beginning of the forward. Backward starts with the head, and reaches the embedding at the end:

    keep_root=False   freed after forward, and gathered again when backward starts
    keep_root=True    whole until the backward is over
    keep_root="auto"  freed when backward reaches the first other unit, when gradients and activations peak;
                      gathered again for a submodule whose backward reads parameters. An embedding's does not: then
                      no more bytes are sent than if they were kept. A single rank frees them after forward

A module of the root may also be called by itself: the units are gathered for it, and for its backward.

"auto" requires parameters that are read only in their own modules' forward. If one belongs to the root module itself,
is read elsewhere before the last unit has run, or makes an output that torch cannot look into, the root is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from ..modules.wrapping import Hook, inside_backward, tensors_that_require_grad
from ..parameters.access import Hiding
from .gathered_unit import GatheredUnit
from .unit import Unit


def owners(root: nn.Module, parameters: set[nn.Parameter]) -> list[tuple[nn.Module, nn.Parameter]]:
    """Returns each module with each of `parameters` that it has itself, in the order of modules."""
    return [(module, p) for module in root.modules() for p in module._parameters.values() if p in parameters]


def is_read_anywhere(root: nn.Module, owner: nn.Module) -> bool:
    """Returns True if a parameter of `owner` may be read outside of its forward: the root's, and those in lists."""
    return owner is root or isinstance(owner, nn.ParameterList | nn.ParameterDict)


def is_read_in_backward(owner: nn.Module) -> bool:
    """Returns True if the backward of `owner` reads its parameters: an embedding's reads only indices."""
    return type(owner) is not nn.Embedding


class Root:
    """The root's units, and the reads observed in the current forward. `frees_in_backward`: the units are freed while
    backward is at other units. `on_backward`: called when backward comes to one of the root's own modules.
    """

    def __init__(
        self, root: nn.Module, units: list[GatheredUnit], has_others: bool, frees: bool, on_backward: Callable[[], None]
    ) -> None:
        self.units = units
        self._on_backward = on_backward
        self._last_read_at = 0  # the uses of other units before the last module of the root whose backward reads it
        self._parameters = {p for unit in units for p in unit.parameters}
        held = owners(root, self._parameters)
        self.frees_in_backward = frees and has_others and not any(is_read_anywhere(root, owner) for owner, _ in held)
        self._reading: Counter[nn.Parameter] = Counter()
        self._read_at: list[int] = []
        self._interception = Hiding(self._note_read, lets_write=True, lets_detach=True)
        self._uses: Callable[[], int] = lambda: 0
        self._in_forward = False
        self._gathered_for_module: list[bool] = []  # by nesting: the units were gathered for the module that runs
        self._is_observed = self.frees_in_backward
        for module in dict.fromkeys(owner for owner, _ in held if owner is not root):
            module.register_forward_pre_hook(Hook(partial(self._before, module)), prepend=True)
            module.register_forward_hook(Hook(partial(self._after, module)), always_call=True)

    def unshard(self) -> None:
        """Gathers the units, if they are not whole."""
        for unit in self.units:
            unit.unshard()

    def reshard_in_backward(self) -> None:
        """Frees the units when backward is at another unit."""
        for unit in self.units if self.frees_in_backward else ():
            unit.reshard()

    def is_on_demand(self, unit: Unit) -> bool:
        """Returns True if `unit` is gathered when a module's backward reads it, and not ahead."""
        return self.frees_in_backward and unit in self.units

    @property
    def is_last(self) -> bool:
        """True if backward comes to a module of the root, such as a head, before any other unit."""
        return self.frees_in_backward and self._last_read_at == self._uses()

    def begin_forward(self, uses: Callable[[], int]) -> None:
        """Starts a training forward; `uses`: returns the number of uses of other units so far. Observes reads:
        no hook would gather the root in backward for a read outside the parameter's module, unless it comes last.
        """
        self._uses, self._in_forward = uses, True
        if self.frees_in_backward:
            for parameter in self._parameters:
                self._interception.intercept(parameter)

    def _note_read(self, parameter: nn.Parameter) -> None:
        """Records a read; a module reads an alias of a tied parameter."""
        if parameter in self._parameters and not self._reading[parameter] and not inside_backward():
            self._read_at.append(self._uses())

    def end_forward(self) -> None:
        """Ends the forward, and evaluates the reads."""
        self._in_forward = False
        self._interception.stop_intercepting(self._parameters)
        self.frees_in_backward = self.frees_in_backward and all(at == self._uses() for at in self._read_at)
        self._read_at.clear()

    def _before(self, module: nn.Module, *_: Any) -> None:
        self._reading.update(p for p in module._parameters.values() if p in self._parameters)
        # not whole: the module is called by itself, or computed again
        self._gathered_for_module.append(not all(unit.is_whole for unit in self.units))
        self.unshard()

    def _after(self, module: nn.Module, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._reading.subtract(p for p in module._parameters.values() if p in self._parameters)
        if self._gathered_for_module.pop() and not inside_backward():
            for unit in self.units:
                unit.reshard()
        called_by_itself = not (self._in_forward or inside_backward())
        is_read = called_by_itself or (self._is_observed and is_read_in_backward(module))
        if tensors := list(tensors_that_require_grad(output)) if is_read else []:
            if self._in_forward:
                self._last_read_at = self._uses()
            register_multi_grad_hook(tensors, self._arrive_in_backward, mode="any")
        elif is_read and self._in_forward and output is not None:  # an error has no output
            # an output that hides its tensors hides their gradients as well
            trains = any(p.requires_grad for p in module.parameters(recurse=False))
            self.frees_in_backward = self.frees_in_backward and not trains

    def _arrive_in_backward(self, _gradient: torch.Tensor) -> None:
        self.unshard()
        self._on_backward()
