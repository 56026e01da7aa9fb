"""Names for tensors and for runs of operations. The engine says what a tensor *is* and which physical
operations make up one logical collective; it does no counting. Whoever measures listens here.

Without a listener every call costs one truth test.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

PARAMETERS = "parameters"
GRADIENTS = "gradients"
MASTER = "master"
OPTIMIZER = "optimizer"
COMMUNICATION = "communication"
INPUTS = "inputs"
ACTIVATIONS = "activations"

DEVICE, HOST, NVME = "device", "host", "nvme"
"""Tiers. On a machine without a GPU device and host are one memory, and what the engine says tells them apart."""

BUFFERS = "buffers"
"""The unit of control traffic that carries a module's buffers, as large as they are."""

READ, WRITE = "read", "write"
"""Transfers between host memory and files, of which no operator of torch's tells."""


class EngineThread(threading.Thread):
    """A thread of the engine's own, which instruments do not follow."""


class Observer(Protocol):
    """Who wants to know."""

    def on_tensor(self, tensor: torch.Tensor, category: str, name: str, tier: str | None) -> None:
        """`tensor`'s storage belongs to `category` from now on (from its birth, if never said before), and lies in
        `tier` all its life; None: where everybody would think.
        """

    def on_file(self, name: str, category: str, grown: int) -> None:
        """What files hold of `category` under `name` has grown by so many bytes; below zero: shrunk."""

    def on_transfer(self, kind: str, size: int, name: str) -> None:
        """So many bytes were read from a file, or written."""


_listeners: list[Observer] = []
_collectives: list[tuple[str, str]] = []
_tiers: list[str] = []
_peers: list[Sequence[int]] = []


def listen(listener: Observer) -> None:
    """Starts telling `listener`."""
    _listeners.append(listener)


def unlisten(listener: Observer) -> None:
    """Stops telling `listener`."""
    _listeners.remove(listener)


def label(tensor: torch.Tensor, category: str, name: str = "", tier: str | None = None) -> torch.Tensor:
    """Says that `tensor`'s storage belongs to `category` and lies in `tier`; returns the tensor."""
    for listener in _listeners:
        listener.on_tensor(tensor, category, name, tier)
    return tensor


def file(name: str, category: str, grown: int) -> None:
    """Says that files hold so many bytes more of `category` under `name`."""
    for listener in _listeners:
        listener.on_file(name, category, grown)


def transfer(kind: str, size: int, name: str = "") -> None:
    """Says that so many bytes were moved, READ from a file or WRITE to one. From any thread."""
    for listener in _listeners:
        listener.on_transfer(kind, size, name)


@contextmanager
def on_tier(tier: str) -> Iterator[None]:
    """What is made inside, in this thread, lies in `tier` where no label says otherwise: an update's temporaries."""
    _tiers.append(tier)
    try:
        yield
    finally:
        _tiers.pop()


def current_tier() -> str | None:
    """The innermost tier of `on_tier`, or None outside any."""
    return _tiers[-1] if _tiers else None


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


@contextmanager
def standing_for(peers: Sequence[int]) -> Iterator[None]:
    """Says that a send inside stands for one to each of `peers`, ranks of its group: of a simulated world."""
    _peers.append(peers)
    try:
        yield
    finally:
        _peers.pop()


def current_peers() -> Sequence[int] | None:
    """Those of the innermost `standing_for`, or None outside any."""
    return _peers[-1] if _peers else None


def current_collective() -> tuple[str, str]:
    """The innermost logical collective and unit, or empty strings outside any."""
    return _collectives[-1] if _collectives else ("", "")
