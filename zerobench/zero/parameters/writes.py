"""Writes to parameters that do not pass through the optimizer, and what becomes of them.

    p.mul_(), nn.init, load_state_dict     the parameter's version tells: the masters follow
    anything inside full_parameters()      values are compared at its end: shards and masters follow
    p.data = ..., module.double()          the parameter's place tells: refused at the next forward or step, but taken
                                           home at the end of full_parameters()
    module.weight = nn.Parameter(...)      the module tells: refused
    edits of optimizer.param_groups        the groups tell: refused at the next step

A rank writes to its own part alone, without a collective: every rank must write the same, as under DDP.

A forward looks at places and versions, a step at versions: some 0.3 µs of the host for each parameter in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .absent import as_they_are, is_placeholder, restore_placeholders
from .versions import Versions

if TYPE_CHECKING:
    from ..strategy import Strategy
    from ..units.unit import Unit

HOW = (
    "write in place inside `with engine.full_parameters()`, or load with engine.module.load_state_dict() or"
    " engine.load_weights()"
)


class Writes:
    """What the engine left, to be compared with what it finds.

    `homes`  of each parameter that the engine has moved: the view that it is, whenever its values are there
    """

    def __init__(self, engine: Strategy) -> None:
        self._engine = engine
        self._names = {p: name for name, p in engine.module.named_parameters()}
        held = {p: home for unit in engine.holders() for p, home in unit.homes()}
        self.homes = held or {p: p.data for p in engine.trainable}
        self._look_at_module()
        self._known_places: list[int] = []  # where all were at the last look, and rightly
        self._numbers = {p: i for i, p in enumerate(engine.trainable)}
        self._loaded: set[int] = set()  # numbers of parameters that load_state_dict has copied to
        self._stored: dict[Unit, None] = {}  # units with parameters that it has copied to while they were in parts
        for unit in self._units:
            unit.versions = Versions(engine.parameters_of(unit))

    @property
    def _units(self) -> Sequence[Unit]:
        return self._engine.holders() or self._engine.units

    # -- the check ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Masters follow what was written in place. Raises RuntimeError for what cannot be followed."""
        self.check_places()
        self.follow()

    def follow(self) -> None:
        """The same, but for the places, at which the next forward will look."""
        for unit in self._stored:
            unit.follow(self._loaded)
        self._stored.clear()
        for unit in self._units:
            if written := unit.versions.written():
                self._follow(unit, written[0])
        self._loaded.clear()

    def note(self) -> None:
        """The engine itself has written, over whatever others had."""
        self._loaded.clear()
        self._stored.clear()
        for unit in self._units:
            unit.versions.note()

    def loaded(self, parameter: nn.Parameter) -> None:
        """All of `parameter` was copied to, and is to be that to the bit, in its master too."""
        if parameter in self._numbers:
            self._loaded.add(self._numbers[parameter])

    def store(self, unit: Unit, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """`values`, of the parameter's shape, were loaded while this rank holds a part of it only: keeps that part."""
        self._engine.update.check_writable(self._names[parameter])
        unit.places.wait()
        self._engine.store(parameter, values)
        self._stored[unit] = None
        unit.versions.note()

    def check_places(self) -> None:
        """Raises RuntimeError, one sentence, where a parameter is not where the engine put it."""
        if self._size() != self._known_size or any(own.get(key) is not one for own, key, one in self._sites):
            self._look_at_module()
        with as_they_are():
            places = [parameter.data_ptr() for parameter in self.homes]
        if places != self._known_places:
            self._check_each_place()
            self._known_places = places

    def _check_each_place(self) -> None:
        for parameter, home in self.homes.items():
            with as_they_are():
                is_home = parameter.data_ptr() == home.data_ptr()
            if not is_home and not is_placeholder(parameter):
                raise RuntimeError(f"{self._names[parameter]}: {self._displaced(parameter, home)}")

    @staticmethod
    def _displaced(parameter: nn.Parameter, home: torch.Tensor) -> str:
        if (parameter.dtype, parameter.device) != (home.dtype, home.device):
            was, is_now = f"{home.dtype} on {home.device}", f"{parameter.dtype} on {parameter.device}"
            return f"it was {was} when initialize() was called and is {is_now} now; convert the model before that"
        return f"its .data was replaced (`p.data = ...`, vector_to_parameters) and would not be trained; {HOW}"

    def _look_at_module(self) -> None:
        """Its parts are others than they were: fine where its parameters are there and no others are to be trained."""
        self._modules = list(self._engine.module.modules())
        parts: list[dict[str, Any]] = [own for m in self._modules for own in (m._parameters, m._modules)]
        self._sites = [(own, name, one) for own in parts for name, one in own.items() if one is not None]
        self._known_size = self._size()
        there = dict.fromkeys(self._engine.module.parameters())
        for parameter, name in self._names.items():
            if parameter not in there:
                raise RuntimeError(
                    f"{name}: the module does not have the parameter any more that initialize() was given, so that it"
                    f" would never be trained; keep the parameter, and {HOW}"
                )
        for name, parameter in self._engine.module.named_parameters():
            if parameter not in self._names and parameter.requires_grad:
                raise RuntimeError(
                    f"{name}: it was added to the module after initialize(), so that its gradient would not be reduced,"
                    " nor would it be trained; add it before, or freeze it by requires_grad_(False)"
                )

    def _size(self) -> int:
        return sum(len(module._parameters) + len(module._modules) for module in self._modules)

    def _follow(self, unit: Unit, parameter: nn.Parameter) -> None:
        """`parameter` of `unit`, and maybe others, were written to in place."""
        if not unit.is_whole:
            restore_placeholders()
            raise RuntimeError(
                f"{self._names[parameter]}: it was written to while this rank held a part of it only; {HOW}"
            )
        self._engine.update.check_writable(self._names[parameter])
        unit.keep_parameters(self._loaded)

    # -- inside full_parameters() -------------------------------------------------------------------------

    @contextmanager
    def keeping(self, unit: Unit) -> Iterator[None]:
        """What is written inside to the parameters of `unit`, which is whole, comes into shards and masters."""
        before = unit.own_slice(unit.full_parameters).clone()
        try:
            yield
        finally:
            self._take_home(unit)
            written = unit.versions.written()
            if written or not torch.equal(before, unit.own_slice(unit.full_parameters)):
                self._engine.update.check_writable(unit.name)
                unit.keep_parameters(self._loaded)

    def _take_home(self, unit: Unit) -> None:
        """Parameters of which `.data` was replaced by another tensor of their kind: its values are taken."""
        for parameter in unit.versions.parameters:
            home = self.homes[parameter]
            alike = (parameter.shape, parameter.dtype, parameter.device) == (home.shape, home.dtype, home.device)
            if parameter.data_ptr() != home.data_ptr() and alike:
                home.copy_(parameter.data)
                parameter.data = home
