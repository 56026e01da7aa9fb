"""Sections of a config: a schema for Hydra while a cell is composed, frozen as soon as they are part of a cell."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any, TypeVar

T = TypeVar("T")


class Section:
    """Base of the dataclasses that are a group or a section of a config.

    Hydra's structured configs have to be mutable, and a resolved cell must not be: one class serves both, and `freeze`
    is the step between them. `dataclasses.replace` makes a mutable copy with changes.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if "_frozen" in self.__dict__:
            raise FrozenInstanceError(
                f"{type(self).__name__}.{name} is part of a cell; dataclasses.replace makes another"
            )
        super().__setattr__(name, value)

    def freeze(self) -> None:
        """Ends all assignments; lists become tuples."""
        if "_frozen" in self.__dict__:
            return
        for one in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, one.name, None)
            if isinstance(value, list):
                setattr(self, one.name, tuple(value))
        self.__dict__["_frozen"] = True

    def values(self) -> dict[str, Any]:
        """Field -> value, as JSON and yaml have them."""
        names = [one.name for one in fields(self)]  # type: ignore[arg-type]
        return {name: _plain(getattr(self, name)) for name in names}


def known(value: T | None) -> T:
    """An option that may be left open on the command line and that `resolve` has filled in."""
    assert value is not None
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
