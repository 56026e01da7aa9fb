"""Sections of a config and their keys. Each key is declared once: a field with its default, and a Key as metadata.

A section is a schema for Hydra while a cell is composed, and is frozen once it is part of a cell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")

KEY = "key"
"""The name of a field's Key in its metadata."""


@dataclass(frozen=True)
class Key:
    """A command line key, except for its name, type and default, which its field has.

    `meaning`: its line in the help. `limits`: the smallest and largest valid numbers. `words`: valid words, in addition
    to null and, with limits, to numbers. `rule`: describes valid values, if `limits` and `words` do not. Names in other
    systems are in docs/reference/other_systems.csv.

    `omitted`: the identity of a cell (config/cell.py) lacks the key if it has its default, so that a new key does not
    change existing identities. `volatile`: the key does not change the measurement. `local`: the key depends on the
    machine, and changes times and losses, but no bytes and no volume.
    """

    meaning: str
    unit: str = ""
    limits: tuple[float, float] | None = None
    words: tuple[str, ...] = ()
    rule: str = ""
    omitted: bool = False
    volatile: bool = False
    local: bool = False

    def __call__(self, default: T) -> T:
        """Returns a schema field with this key and the given default."""
        made: T = field(default=default, metadata={KEY: self})
        return made

    def made(self, factory: Callable[[], T]) -> T:
        """Returns a schema field with this key whose default `factory` makes for each object."""
        made: T = field(default_factory=factory, metadata={KEY: self})
        return made


def keys_of(schema: Any) -> dict[str, Key]:
    """Returns the keys of a schema, or of an instance of one, by name; a user's options have none."""
    return {key.name: key.metadata[KEY] for key in fields(schema) if KEY in key.metadata}


class Section:
    """Base of the dataclasses that are groups or sections of a config.

    Hydra's structured configs must be mutable, and a resolved cell must not be: one class serves both, and `freeze`
    separates the two phases. `dataclasses.replace` makes a mutable copy with changes.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if "_frozen" in self.__dict__:
            raise FrozenInstanceError(
                f"{type(self).__name__}.{name} is part of a cell; dataclasses.replace makes another"
            )
        super().__setattr__(name, value)

    def freeze(self) -> None:
        """Forbids further assignments; lists become tuples."""
        if "_frozen" in self.__dict__:
            return
        for key in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, key.name, None)
            if isinstance(value, list):
                setattr(self, key.name, tuple(value))
        self.__dict__["_frozen"] = True

    def values(self) -> dict[str, Any]:
        """Field -> value, as plain types for JSON and yaml."""
        names = [key.name for key in fields(self)]  # type: ignore[arg-type]
        return {name: _plain(getattr(self, name)) for name in names}


def known(value: T | None) -> T:
    """Returns an option that may be left open on the command line and that `resolve` has filled in."""
    assert value is not None
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value
