"""Names for tensors and for runs of operations. The engine says what a tensor *is* and which physical
operations make up one logical collective; it does no counting. Whoever measures listens here.

Without a listener every call costs one truth test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

PARAMETERS = "parameters"
GRADIENTS = "gradients"
MASTER = "master"
OPTIMIZER = "optimizer"
COMMUNICATION = "communication"
INPUTS = "inputs"


class Listener(Protocol):
    """Who wants to know."""

    def on_tensor(self, tensor: torch.Tensor, category: str, name: str) -> None:
        """`tensor`'s storage belongs to `category` from now on (from its birth, if never said before)."""


_listeners: list[Listener] = []
_collectives: list[tuple[str, str]] = []


def listen(listener: Listener) -> None:
    """Starts telling `listener`."""
    _listeners.append(listener)


def unlisten(listener: Listener) -> None:
    """Stops telling `listener`."""
    _listeners.remove(listener)


def label(tensor: torch.Tensor, category: str, name: str = "") -> torch.Tensor:
    """Says that `tensor`'s storage belongs to `category`; returns the tensor."""
    for listener in _listeners:
        listener.on_tensor(tensor, category, name)
    return tensor


@contextmanager
def collective(name: str, unit: str = "") -> Iterator[None]:
    """Names the logical collective (and its unit) that the physical operations inside make up.

    The name "control" marks traffic outside the volume: flags, buffers, start-up.
    """
    _collectives.append((name, unit))
    try:
        yield
    finally:
        _collectives.pop()


def current_collective() -> tuple[str, str]:
    """The innermost logical collective and unit, or empty strings outside any."""
    return _collectives[-1] if _collectives else ("", "")
