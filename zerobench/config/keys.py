"""All keys of the command line by their names, from the schemas that declare them, and the check of their limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from ..sections import KEY, Key, Section, keys_of
from ..strategies import spec_of
from .schema import SCHEMAS, SECTIONS, Config

GROUPS: dict[str, Key] = {
    **{name: key for name, key in keys_of(Config).items() if name in SCHEMAS},
    "experiment": Key("a sweep or setting that comes with zerobench; the head of its file explains it"),
    **{name: key for name, key in keys_of(Config).items() if name in SECTIONS},
}
"""Group, or section of keys -> its Key."""


def _fields() -> Iterator[tuple[str, Field[Any]]]:
    schemas: list[tuple[str, type]] = [("", Config)]
    schemas += [(f"{group}.", schema) for group, choices in SCHEMAS.items() for schema in choices.values()]
    schemas += [(f"{section}.", schema) for section, schema in SECTIONS.items()]
    for prefix, schema in schemas:
        yield from ((f"{prefix}{field.name}", field) for field in fields(schema) if KEY in field.metadata)


KEYS: dict[str, Key] = {name: field.metadata[KEY] for name, field in _fields() if name not in GROUPS}
"""Key -> its declaration, the same in all choices of its group."""


def omitted() -> dict[str, Any]:
    """Returns the default of each key that an identity leaves out at its default; for a group, the default choice."""
    defaults: dict[str, Any] = {}
    for name, field in _fields():
        if field.metadata[KEY].omitted:
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            in_group = name in GROUPS
            defaults[f"{name}.name" if in_group else name] = getattr(default, "name", None) if in_group else default
    return defaults


AUTO = "auto"
"""The word for a number derived from the model."""


def problems_of(cell: Config) -> list[str]:
    """Returns error messages for values of a cell that are out of range."""
    problems = []
    holders: dict[str, Any] = {"": cell} | {
        name: part for name, part in vars(cell).items() if isinstance(part, Section)
    }
    if spec_of(cell.strategy.name).of_user:  # an equal name may mean something else there
        del holders["strategy"]
    named = ((section, holder, *pair) for section, holder in holders.items() for pair in keys_of(holder).items())
    for section, holder, name, key in named:
        value, path = getattr(holder, name), f"{section}.{name}".lstrip(".")
        if key.limits is None or value is None or str(value) in key.words:
            continue
        least, most = key.limits
        if isinstance(value, str):
            problems.append(f"{path}={value}: use {AUTO} or bytes, at least {least:g}, as in 25MiB")
        elif not least <= value <= most:
            why = "; memory is counted from the third step on, when optimizer states exist" if "warmup" in path else ""
            bound = f"at most {most:g}" if value > most else f"at least {least:g}"
            problems.append(f"{path}={value}: must be {bound}{why}")
    return problems
