"""Gives a model on the meta device its values; no rank ever holds more of the model than its stage does.

    placeholders   every parameter is a NaN of its shape on the real device, without memory
    adopted        the stage has divided them into units, still without values
    filled         the model's initializers have run again, one module at a time, on scratch tensors for the parameters
                   that they read or write, of any module; every rank keeps its part of the values

Construction on meta draws no random numbers. The replay draws them in the order of a plain construction: first those
of each module's constructor (`reset_parameters`, children before parents), then those of the model's own steps, which
it must declare: `model.initializers()` yields (module, function of the module) in order. All ranks draw with rank 0's
generator, the CPU's by default, so that the values equal those of a plain construction there.

A tied parameter takes the values of its first place; values that the modules of other places draw are discarded. An
initializer that reads a parameter, to scale it for example, reads the stored values, in the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from ..comm.base import Comm
from ..layout import MemoryOrder
from ..precision import TRAINED, Counted
from .access import Hiding

Initializer = Callable[[nn.Module], Any]
Store = Callable[[nn.Parameter, torch.Tensor], None]
Read = Callable[[nn.Parameter], torch.Tensor]

_PLACEHOLDERS = "_zerobench_placeholders"

_OWN_WAYS = ("_init_weights", "init_weights", "_reset_parameters")
"""Methods by which models outside of this package initialize themselves, which a replay would miss."""


def on_meta(model: nn.Module) -> bool:
    """Returns True if the model was built on the meta device. Raises ValueError if only part of it was."""
    if hasattr(model, _PLACEHOLDERS):
        return True
    meta = {parameter.is_meta for parameter in model.parameters()}
    if len(meta) == 2:
        name = next(name for name, parameter in model.named_parameters() if parameter.is_meta)
        raise ValueError(
            f"{name}: it is on the meta device while other parameters are not; build all of the model there"
        )
    return meta == {True}


def check_replay(model: nn.Module) -> None:
    """Raises ValueError for a model whose initial values a replay cannot restore."""
    for name, parameter in model.named_parameters():
        if parameter.dtype not in TRAINED:
            raise ValueError(
                f"{name}: no initializer draws {parameter.dtype}; build the model on a device, not on meta"
            )
    is_declared = _own_initializers(model) is not None
    for name, module in model.named_modules():
        way = next((way for way in _OWN_WAYS if hasattr(module, way)), None)
        if way and not is_declared:
            raise ValueError(
                f"{name or type(model).__name__}: it initializes itself in {way}, which cannot be replayed on the meta"
                " device; give the model initializers(), or build it on a real device"
            )
        if list(module.parameters(recurse=False)) and not is_declared and not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"{name or type(model).__name__}: {type(module).__name__} has parameters and no reset_parameters(), so"
                " that its values on the meta device are lost; give it one, or build the model on a real device"
            )


def use_placeholders(model: nn.Module, device: torch.device) -> None:
    """Replaces meta parameters by placeholders on `device`, in place: an optimizer may reference the parameters."""
    if hasattr(model, _PLACEHOLDERS):
        return
    orders = {parameter: MemoryOrder.of(parameter) for parameter in model.parameters()}
    for parameter in orders:
        nothing = torch.full((), float("nan"), dtype=parameter.dtype, device=device).expand(parameter.shape)
        torch.utils.swap_tensors(parameter, nn.Parameter(nothing, requires_grad=parameter.requires_grad))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    setattr(model, _PLACEHOLDERS, orders)


def memory_orders(model: nn.Module) -> dict[nn.Parameter, MemoryOrder]:
    """Returns each parameter's memory order; for a placeholder, the order of the meta parameter."""
    orders: dict[nn.Parameter, MemoryOrder] | None = getattr(model, _PLACEHOLDERS, None)
    return orders or {parameter: MemoryOrder.of(parameter) for parameter in model.parameters()}


def fill(
    model: nn.Module, store: Store, read: Read, comm: Comm, dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """Fills a model of placeholders that a stage has adopted. `store(parameter, values)` keeps this rank's part of
    `values`, which have dtype `dtype` and are drawn on `device`, by default the CPU; `read(parameter)` returns all
    values that were stored. Raises ValueError for values that no step restores.
    """
    device = device or torch.device("cpu")
    versions = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
    own_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    state = own_state.to(next(model.parameters()).device, copy=True)  # on a device that the ranks can communicate from
    comm.broadcast(state)
    state = state.cpu()
    _set_generator_state(state, device)
    replay = _Replay(model, read, dtype, device)
    try:
        for module, initialize in _steps(model):
            for parameter, values in replay.run(module, initialize):
                store(parameter, values)
        replay.check_places()
    finally:
        replay.end()
    if not torch.equal(own_state, state):  # this rank was seeded differently: it continues with its own generator
        _set_generator_state(own_state, device)
    lost = [name for name, p in model.named_parameters() if p not in replay.stored and p.numel()]
    lost += [name for name, (buffer, version) in versions.items() if buffer._version == version and buffer.numel()]
    delattr(model, _PLACEHOLDERS)
    if lost:
        raise ValueError(
            f"{lost[0]}: nothing has restored its values, lost on the meta device; restore it in its module's"
            " reset_parameters() or in the model's initializers(), or build the model on a real device"
        )


def _steps(model: nn.Module) -> Iterator[tuple[nn.Module, Initializer]]:
    for module in _children_first(model, set()):
        if hasattr(module, "reset_parameters"):
            yield module, methodcaller("reset_parameters")
    own = _own_initializers(model)
    if own is not None:
        yield from own()


def _own_initializers(model: nn.Module) -> Callable[[], Iterable[tuple[nn.Module, Initializer]]] | None:
    # Models for older releases use the British spelling; missing it would silently change their initial values.
    return getattr(model, "initializers", None) or getattr(model, "initialisers", None)


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _set_generator_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class _Replay:
    """The model with scratch parameters in place of its own, while its initializers run.

    `stored`  the parameters that have got values
    A scratch parameter has no memory until an initializer reads or writes it, and loses it when the initializer ends.
    """

    def __init__(self, model: nn.Module, read: Read, dtype: torch.dtype, device: torch.device) -> None:
        self.stored: set[nn.Parameter] = set()
        self._read = read
        self._like: dict[str, Any] = {"dtype": dtype, "device": device}
        self._hiding = Hiding(self._give_memory)
        self._versions: dict[nn.Parameter, int] = {}  # of those with memory
        self._places: dict[nn.Parameter, tuple[nn.Module, str, nn.Parameter]] = {}  # scratch -> its place
        self._first: dict[nn.Parameter, nn.Parameter] = {}  # parameter -> the scratch of its first place
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    scratch = Counted(torch.empty(0, **self._like))
                    self._hiding.hide(scratch, self._hole(parameter))
                    self._places[scratch] = module, name, parameter
                    self._first.setdefault(parameter, scratch)
                    module._parameters[name] = scratch

    def _hole(self, parameter: nn.Parameter) -> torch.Tensor:
        return torch.full((), float("nan"), **self._like).expand(parameter.shape)

    def _give_memory(self, scratch: nn.Parameter, writes: bool = False) -> None:
        parameter = self._places[scratch][2]
        values = torch.full(parameter.shape, float("nan"), **self._like)
        if parameter in self.stored:
            values.copy_(self._read(parameter))
        self._hiding.show(scratch, values)
        self._versions[scratch] = scratch._version

    def run(self, module: nn.Module, initialize: Initializer) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yields the values that one initializer gives to parameters, except those that it leaves unchanged."""
        with torch.no_grad():
            initialize(module)
        for scratch, version in self._versions.items():
            owner, name, parameter = self._places[scratch]
            values = scratch.detach()
            if scratch._version != version and (owner is not module or self._first[parameter] is scratch):
                if values.isnan().any():
                    raise ValueError(
                        f"{type(owner).__name__}.{name}: an initializer writes to a part of it, or changes its values,"
                        " before it has any; from the meta device that cannot be replayed: let it overwrite the whole"
                        " parameter"
                    )
                yield parameter, values
                self.stored.add(parameter)
            self._hiding.hide(scratch, self._hole(parameter))
        self._versions.clear()

    def check_places(self) -> None:
        """Raises ValueError for a parameter that an initializer has replaced."""
        for scratch, (module, name, _) in self._places.items():
            if module._parameters.get(name) is not scratch:
                raise ValueError(
                    f"{type(module).__name__}.{name}: an initializer replaces this parameter, which cannot be replayed"
                    " on the meta device: write to it in place"
                )

    def end(self) -> None:
        """Gives the modules their own parameters back."""
        for module, name, parameter in self._places.values():
            module._parameters[name] = parameter
