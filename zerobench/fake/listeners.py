"""Those that hear of the bytes of fake tensors, in order, beside the ledger which counts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class StoredBytes(Protocol):
    """A storage as a ledger knows it: its `bytes`, and the `tier` that they are in, which a label may still change."""

    bytes: int
    tier: str


class Listener(Protocol):
    """An object that a ledger of fake tensors tells what it hears."""

    def on_growth(self, stored: StoredBytes, grown: int) -> None:
        """`stored` grew by so many bytes, or shrank where `grown` is below 0."""

    def on_phase(self, name: str) -> None:
        """A phase begins."""

    def on_begin(self) -> None:
        """An interval begins: a step."""

    def on_end(self, whole: str) -> None:
        """An interval ends: "init", or a measured "step"."""


_waiting: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tells `listener` of all that the next ledger hears: the rank's own, which is made first."""
    _waiting.append(listener)
    try:
        yield
    finally:
        _waiting.clear()


def take_listeners() -> tuple[Listener, ...]:
    """Returns those that wait for a ledger; they wait no longer."""
    taken = tuple(_waiting)
    _waiting.clear()
    return taken
