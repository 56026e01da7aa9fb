"""Outputs of operators that are remembered by what they depend on, which without values are shapes alone.

torch's own mode remembers as well, under keys that hold all that a program may do to a tensor, and takes longer over a
key than over the output. Here an operator is remembered where it aliases nothing, its outputs have storages of their
own, and all that it is given is a plain fake tensor, a number, or a word of torch's; any other runs as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

WORDS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that a key holds as they are."""

MOST_KEYS = 100_000
"""Keys beyond which all are forgotten: an argument may be a number that changes at each step."""

Made = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""A tensor of its own storage: shape, strides, dtype, device."""


class Unkeyed(Exception):
    """An argument that no key can hold."""


class Remembered:
    """The outputs of operators under one mode, by operator and arguments. None: it has to run."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._known: dict[Any, tuple[type, list[Made | None]] | None] = {}

    def call(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        """Returns what the operator returns."""
        if not is_functional(func):
            return func(*args, **named)
        try:
            key = (func, torch.get_default_dtype(), _key_of(args), _key_of(list(named.items())))
        except Unkeyed:
            return func(*args, **named)
        if key in self._known:
            recipe = self._known[key]
            return func(*args, **named) if recipe is None else self._make(*recipe)
        found = func(*args, **named)
        if len(self._known) >= MOST_KEYS:
            self._known.clear()
        self._known[key] = _recipe_of(found, args)
        return found

    def _make(self, kind: type, outputs: list[Made | None]) -> Any:
        made = [None if one is None else self._tensor(*one) for one in outputs]
        return made[0] if kind is FakeTensor else kind(made)

    def _tensor(self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        with in_kernel_invocation_manager(self._fake):
            meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return FakeTensor(self._fake, meta, device)


@cache
def is_functional(func: Any) -> bool:
    """Returns True for an operator of torch's own that aliases nothing and whose outputs' shapes no values decide."""
    schema = func._schema
    decided_by_values = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return (
        func.namespace == "aten"
        and not decided_by_values & set(func.tags)
        and all(one.alias_info is None for one in (*schema.arguments, *schema.returns))
    )


def _key_of(one: Any) -> Any:
    if type(one) is FakeTensor:
        if one.constant is not None:
            raise Unkeyed
        return tuple(one.shape), one.stride(), one.dtype, one.fake_device
    if isinstance(one, tuple | list):
        return tuple(map(_key_of, one))
    if isinstance(one, WORDS):
        return type(one), one
    raise Unkeyed


def _recipe_of(found: Any, args: Any) -> tuple[type, list[Made | None]] | None:
    """Returns how to make an output again; None for one that is not made of tensors with storages of their own: some
    operators return what they were given, whatever their schema says.
    """
    outputs = [found] if isinstance(found, FakeTensor) else found
    if type(found) not in (FakeTensor, tuple, list):
        return None
    storages = list(_storages(outputs))
    if len(set(storages)) < len(storages) or set(storages) & set(_storages(args)):
        return None
    recipes = [_made(one) for one in outputs]
    return None if any(one is False for one in recipes) else (type(found), recipes)


def _storages(some: Any) -> Iterator[int]:
    for one in some:
        if isinstance(one, torch.Tensor):
            yield one.untyped_storage()._cdata
        elif isinstance(one, tuple | list):
            yield from _storages(one)


def _made(one: Any) -> Any:
    if one is None:
        return None
    if type(one) is not FakeTensor or one.constant is not None or one.layout != torch.strided:
        return False
    needed = torch._prims_common.compute_required_storage_length(one.shape, one.stride(), 0) * one.element_size()
    if one.storage_offset() or one.untyped_storage().nbytes() != needed or one.is_conj() or one.is_neg():
        return False
    return one.shape, one.stride(), one.dtype, one.fake_device
