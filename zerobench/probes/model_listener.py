"""Observation of the model itself: which modules run, when gradients arrive, which tensors are full parameters.

slot        a module and its own name for a parameter; a strategy may put other tensors there while the module runs
arrival     a gradient of a parameter is computed
tied        a parameter in several slots; each use has a gradient in its own storage until they are summed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from ..zero import labels
from ..zero.modules.wrapping import tensors_that_require_grad
from .event_log import EventLog
from .labeling import contains_others, has_storage, label_parts
from .ledger import Ledger
from .probe import EventOrder


class ModelListener:
    """Labels a model's parameters and gradients; records the order of modules and gradients, in `log` too."""

    def __init__(self, ledger: Ledger, log: EventLog | None) -> None:
        self._ledger, self._log = ledger, log
        self._arrivals: list[int] = []
        self._modules_run: list[tuple[str, bool]] = []
        self._names: dict[nn.Module, str] = {}
        self._running: list[tuple[str, int | None]] = []  # and its index in `_modules_run`, if it has one
        self._tied = WeakTensorKeyDictionary()
        self._tied_names: set[str] = set()
        self._slots: dict[tuple[nn.Module, str], tuple[int, str]] = {}
        self._hooked = WeakTensorKeyDictionary()  # weak, as `_tied`: measuring must not keep tensors alive
        self._stack = ExitStack()

    def __enter__(self) -> ModelListener:
        for hook in (
            module_hooks.register_module_forward_pre_hook(self._enter_module),
            module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._stack.callback(hook.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        for registry in (self._names, self._slots, self._tied, self._hooked):
            registry.clear()  # measuring keeps no model alive

    @property
    def order(self) -> EventOrder:
        """The order of events since the last `begin_forward`."""
        return EventOrder(tuple(self._arrivals), tuple(self._modules_run))

    def begin_forward(self) -> None:
        """Forgets the order of the previous forward."""
        self._arrivals.clear()
        self._modules_run.clear()

    def listen_to(self, model: nn.Module) -> None:
        """Listens to a model's modules and gradients, until the listener ends."""
        self._names = {module: name for name, module in model.named_modules()}
        numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
        for module, path in self._names.items():
            for own, parameter in module.named_parameters(recurse=False):
                self._slots[module, own] = numbers[parameter], f"{path}.{own}".removeprefix(".")
        uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
        tied = {p: name for name, p in model.named_parameters() if uses[p] > 1 and p.requires_grad}
        self._tied, self._tied_names = WeakTensorKeyDictionary(tied), set(tied.values())
        for name, parameter in model.named_parameters():
            if parameter not in tied:  # a strategy may put other leaves in the slots of a tied one
                self._listen_for_gradient(parameter, numbers[parameter], name)

    def before_backward(self, loss: torch.Tensor) -> None:
        """Labels gradients of a tied parameter: one per use, kept until they are summed. Hooks the graph of `loss`."""
        seen: set[Any] = set()
        nodes = [loss.grad_fn] if self._tied else []
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for index, (following, _) in enumerate(node.next_functions):
                leaf = getattr(following, "variable", None)
                if leaf is not None and leaf in self._tied:
                    node.register_hook(partial(_label_use, index, self._tied[leaf]))
                nodes.append(following)

    def _gradient_arrived(self, number: int, name: str, gradient: torch.Tensor) -> None:
        self._arrivals.append(number)
        label_parts(gradient, labels.GRADIENTS, name)

    def _listen_for_gradient(self, parameter: nn.Parameter, number: int, name: str) -> None:
        if parameter.requires_grad and parameter not in self._hooked:
            self._hooked[parameter] = name
            if name in self._tied_names:
                self._tied[parameter] = name
            self._stack.callback(parameter.register_hook(partial(self._gradient_arrived, number, name)).remove)

    def _enter_module(self, module: nn.Module, _inputs: object) -> None:
        if torch.compiler.is_compiling():  # traced, inside of a graph that will call no module
            return
        name = self._names.get(module, type(module).__name__)
        index = len(self._modules_run) if self._ledger.phase == "forward" else None
        self._running.append((name, index))
        self._ledger.module = name
        if index is not None:
            self._modules_run.append((name, False))
        if self._log is not None:
            self._log.module_begins(name)

    def _leave_module(self, module: nn.Module, _inputs: object, output: object) -> None:
        """Labels the full parameters of a running module, including those that a strategy has put there temporarily."""
        if torch.compiler.is_compiling():
            return
        is_graph = getattr(module.forward, "is_one_graph", False)
        for owner in module.modules() if is_graph else (module,):
            for own, parameter in owner.named_parameters(recurse=False):
                if (owner, own) in self._slots and has_storage(parameter) and not contains_others(parameter):
                    number, full_name = self._slots[owner, own]
                    labels.label(parameter, labels.PARAMETERS, "" if parameter in self._hooked else full_name)
                    if torch.is_grad_enabled():
                        self._listen_for_gradient(parameter, number, full_name)
        name, index = self._running.pop()
        self._ledger.module = self._running[-1][0] if self._running else ""
        # Reentrant recomputation runs the module without gradients, and backward returns to it too.
        if index is not None and self._ledger.phase == "forward":
            returns = not torch.is_grad_enabled() or any(True for _ in tensors_that_require_grad(output))
            self._modules_run[index] = (name, returns)
        if self._log is not None:
            self._log.module_ends(name, output)


def _label_use(index: int, name: str, gradients: Sequence[torch.Tensor | None], _outputs: object) -> None:
    gradient = gradients[index]
    if gradient is not None:
        labels.label(gradient, labels.GRADIENTS, f"{name}, one place of use")
