"""Converts dataclasses to plain values for JSON, and back by their types.

Nothing is unpickled: data from another machine can only become the requested types. Floats keep every bit, since JSON
has the shortest text that parses to the same number.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_hints_of = cache(get_type_hints)


def to_plain(value: Any) -> Any:
    """Converts dataclasses to dicts, including those in lists, tuples and dicts; other values are unchanged. A
    dataclass with its own form provides it as `as_dict` and `from_dict`.
    """
    if is_dataclass(value) and not isinstance(value, type):
        if (own_form := getattr(value, "as_dict", None)) is not None:
            return own_form()
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return {key: to_plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def rebuild(kind: Any, value: Any) -> Any:
    """Rebuilds the value of type `kind` from the result of `to_plain`. Raises ValueError if it does not fit."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _rebuild_dataclass(kind, value)
    if origin in (Union, UnionType):
        for part in parts:
            with suppress(ValueError):
                return rebuild(part, value)
    if origin is list and isinstance(value, list):
        return [rebuild(parts[0], item) for item in value]
    if origin is tuple and isinstance(value, list):
        kinds = parts[:1] * len(value) if parts[1:] == (...,) else parts
        return tuple(rebuild(expected, part) for expected, part in zip(kinds, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {key: rebuild(parts[1], item) for key, item in value.items()}
    if type(value) is kind or (kind is type(None) and value is None):
        return value
    if kind is float and type(value) is int:  # a column of type float may hold a whole number
        return value
    raise ValueError(f"{value!r:.60} is no {getattr(kind, '__name__', kind)}")


def _rebuild_dataclass(kind: Any, value: Any) -> Any:
    if hasattr(kind, "from_dict") and isinstance(value, dict):
        try:
            return kind.from_dict(value)
        except TypeError as error:
            raise ValueError(f"{value!r:.60} is no {kind.__name__}: {error}") from error
    types = _hints_of(kind)
    if not isinstance(value, dict) or set(value) != {field.name for field in fields(kind)}:
        raise ValueError(f"{value!r:.60} is no {kind.__name__}")
    return kind(**{name: rebuild(types[name], item) for name, item in value.items()})
