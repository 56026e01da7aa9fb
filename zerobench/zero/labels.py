"""Labels for tensors and for runs of operations: the interface between the engine and the probes.

The engine states the category of each tensor, and which physical operations form one logical collective; it counts
nothing. Probes register as observers. Without an observer every call costs one truth test.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
"""Tiers. Without a GPU, device and host are one memory, which only the engine's labels distinguish."""

BUFFERS = "buffers"
"""The unit name of control traffic that carries a module's buffers, whatever their size."""

READ, WRITE = "read", "write"
"""Kinds of transfers between host memory and files, which no torch operator reports."""


class EngineThread(threading.Thread):
    """A thread of the engine's own, which instruments do not follow but inside `followed`."""


class Updated(Protocol):
    """A part of a parameter that an optimizer updates: `tensor` in `tier`, of the engine's unit `unit_name`."""

    tensor: torch.nn.Parameter
    tier: str

    @property
    def unit_name(self) -> str:
        """The unit, or empty."""


class Observer:
    """Observer of labels; a class that extends it ignores what it does not define."""

    def on_tensor(self, tensor: torch.Tensor, category: str, name: str, tier: str | None) -> None:
        """Records that `tensor`'s storage belongs to `category` from now on (from its birth, if it had no label
        before).
        """

    def on_file(self, name: str, category: str, grown: int) -> None:
        """Records that the files' bytes of `category` under `name` have grown by `grown`; negative: shrunk."""

    def on_transfer(self, kind: str, size: int, name: str) -> None:
        """Records that `size` bytes were read from a file, or written."""

    def on_unit(self, kind: str, unit: str, size: int) -> None:
        """Records that a unit's full parameters of `size` bytes are there (GATHERED), or are given back (FREED)."""

    def on_wait(self, operation: int) -> None:
        """Records that a wait for the operation of this number has returned."""

    def on_update(self, parts: Sequence[Updated]) -> None:
        """Records that an optimizer is about to update those of the `parts` that have a gradient."""

    def followed(self) -> AbstractContextManager[object]:
        """Inside, this observer sees the operators of the present thread, an EngineThread."""
        return nullcontext()


GATHERED, FREED = "unit_gathered", "unit_freed"
"""Kinds of events of a unit."""

_observers: list[Observer] = []
_collectives: list[tuple[str, str, int]] = []
_operations = 0
_tiers: list[str] = []
_sends: list[tuple[Sequence[int], int]] = []


def listen(observer: Observer) -> None:
    """Adds an observer."""
    _observers.append(observer)


def unlisten(observer: Observer) -> None:
    """Removes an observer."""
    _observers.remove(observer)


def label(tensor: torch.Tensor, category: str, name: str = "", tier: str | None = None) -> torch.Tensor:
    """Tells observers that `tensor`'s storage belongs to `category` and lies in `tier`; returns the tensor."""
    for observer in _observers:
        observer.on_tensor(tensor, category, name, tier)
    return tensor


def file(name: str, category: str, grown: int) -> None:
    """Tells observers that files hold `grown` more bytes of `category` under `name`."""
    for observer in _observers:
        observer.on_file(name, category, grown)


def transfer(kind: str, size: int, name: str = "") -> None:
    """Tells observers that `size` bytes were moved, READ from a file or WRITE to one. From any thread."""
    for observer in _observers:
        observer.on_transfer(kind, size, name)


def unit(kind: str, name: str, size: int) -> None:
    """Tells observers that a unit's full parameters of `size` bytes are there (GATHERED), or are given back (FREED)."""
    for observer in _observers:
        observer.on_unit(kind, name, size)


def waited(operation: int) -> None:
    """Tells observers that a wait for the operation that `collective` gave this number has returned."""
    for observer in _observers:
        observer.on_wait(operation)


def updates(parts: Sequence[Updated]) -> None:
    """Tells observers that an optimizer is about to update those of the `parts` that have a gradient."""
    for observer in _observers:
        observer.on_update(parts)


def observed() -> bool:
    """Returns True while there is an observer. A launch whose operations another thread issues then waits for these, so
    that they are seen in the launch's phase, under its name, in one order in every run.
    """
    return bool(_observers)


@contextmanager
def followed() -> Iterator[None]:
    """Shows observers the operators that this EngineThread issues inside, for a launch that waits meanwhile."""
    with ExitStack() as stack:
        for observer in _observers:
            stack.enter_context(observer.followed())
        yield


@contextmanager
def on_tier(tier: str) -> Iterator[None]:
    """Places tensors made inside, in this thread, in `tier` unless a label says otherwise: an update's temporaries."""
    _tiers.append(tier)
    try:
        yield
    finally:
        _tiers.pop()


def current_tier() -> str | None:
    """Returns the innermost tier of `on_tier`, or None outside any."""
    return _tiers[-1] if _tiers else None


@contextmanager
def collective(name: str, unit: str = "") -> Iterator[int]:
    """Names the logical collective (and its unit) that the physical operations inside make up.

    The name "control" marks traffic outside the volume: flags, buffers, start-up. Yields the operation's number.
    """
    global _operations
    _operations += 1
    _collectives.append((name, unit, _operations))
    try:
        yield _operations
    finally:
        _collectives.pop()


@contextmanager
def standing_for(peers: Sequence[int], each: int = 1) -> Iterator[None]:
    """Accounts a send inside as `each` sends to each of `peers`, ranks of its group: for a simulated world."""
    _sends.append((peers, each))
    try:
        yield
    finally:
        _sends.pop()


def current_sends() -> tuple[Sequence[int], int]:
    """Returns the peers of the innermost `standing_for` and the sends to each; no peers outside any."""
    return _sends[-1] if _sends else ((), 1)


def current_collective() -> tuple[str, str]:
    """Returns the innermost logical collective and unit, or empty strings outside any."""
    return _collectives[-1][:2] if _collectives else ("", "")


def current_operation() -> int:
    """Returns the number of the innermost logical collective, from 1, or 0 outside any."""
    return _collectives[-1][2] if _collectives else 0
