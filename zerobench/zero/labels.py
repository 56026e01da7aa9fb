"""Labels for tensors and for runs of operations: the interface between the engine and the probes.

The engine reports the category of each tensor, and which physical operations form one logical collective; it counts
nothing. Probes register as observers. Without an observer every call costs one truth test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

PARAMETERS = "parameters"
GRADIENTS = "gradients"
MASTER = "master"
OPTIMIZER = "optimizer"
COMMUNICATION = "communication"
INPUTS = "inputs"
ACTIVATIONS = "activations"

DEVICE, HOST, NVME = "device", "host", "nvme"
"""Tiers. Without a GPU, device and host are the same memory, which only the engine's labels distinguish."""

BUFFERS = "buffers"
"""The unit name of control traffic that carries a module's buffers; its size does not matter."""

READ, WRITE = "read", "write"
"""Kinds of transfers between host memory and files, which no torch operator shows."""


class Held(NamedTuple):
    """A tensor that an engine holds between steps, with its label: the arguments of `label`."""

    tensor: torch.Tensor
    category: str
    name: str
    tier: str | None = None


class EngineThread(threading.Thread):
    """An engine-owned thread, which instruments follow only inside `followed`."""


class Updated(Protocol):
    """A part of a parameter that an optimizer updates: `tensor` in `tier`, of the engine's unit `unit_name`."""

    tensor: torch.nn.Parameter
    tier: str
    unit_name: str


class Observer:
    """Observer of labels; subclasses override the events that they need."""

    def on_tensor(self, tensor: torch.Tensor, category: str, name: str, tier: str | None) -> None:
        """Records that `tensor`'s storage belongs to `category`: from its allocation, if it is its first label."""

    def on_file(self, path: str, name: str, category: str, size: int) -> None:
        """Records that the file at `path` holds `size` bytes of `category` under `name`."""

    def on_transfer(self, kind: str, size: int, name: str) -> None:
        """Records that `size` bytes were read from a file, or written to one."""

    def on_unit(self, kind: str, unit: str, size: int) -> None:
        """Records that a unit's full parameters of `size` bytes are present (GATHERED), or freed (FREED)."""

    def on_wait(self, operation: int) -> None:
        """Records that a wait for the operation of this number has returned."""

    def on_update(self, parts: Sequence[Updated]) -> None:
        """Records that an optimizer is about to update `parts`, which have gradients."""

    def followed(self) -> AbstractContextManager[object]:
        """Inside, this observer sees the operators of the current thread, an EngineThread."""
        return nullcontext()


GATHERED, FREED = "unit_gathered", "unit_freed"
"""Kinds of unit events."""

T = TypeVar("T")

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
    """Reports to observers that `tensor`'s storage belongs to `category` and is in `tier`; returns the tensor."""
    for observer in _observers:
        observer.on_tensor(tensor, category, name, tier)
    return tensor


def _reporting(event: str) -> Callable[..., None]:
    """Returns a function that reports an event to all observers, with the arguments of their method."""

    def report(*facts: Any) -> None:
        for observer in _observers:
            getattr(observer, event)(*facts)

    return report


file, transfer, unit = _reporting("on_file"), _reporting("on_transfer"), _reporting("on_unit")
waited, updates = _reporting("on_wait"), _reporting("on_update")
"""Reports of the observers' events of these names; `transfer` from any thread."""


def observed() -> bool:
    """Returns True while there is an observer. A launch whose operations are issued by another thread then waits for
    them, so that they are seen in the launch's phase, under its name, in the same order in every run.
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
def _pushed(stack: list[T], entry: T) -> Iterator[T]:
    stack.append(entry)
    try:
        yield entry
    finally:
        stack.pop()


def on_tier(tier: str) -> AbstractContextManager[object]:
    """Attributes tensors made inside, in this thread, to `tier` unless labeled otherwise: an update's temporaries."""
    return _pushed(_tiers, tier)


def current_tier() -> str | None:
    """Returns the innermost tier of `on_tier`, or None outside any."""
    return _tiers[-1] if _tiers else None


@contextmanager
def collective(name: str, unit: str = "") -> Iterator[int]:
    """Names the logical collective (and its unit) that the physical operations inside make up. The name "control" marks
    traffic outside the volume: flags, buffers, start-up. Yields the operation's number.
    """
    global _operations
    _operations += 1
    _collectives.append((name, unit, _operations))
    try:
        yield _operations
    finally:
        _collectives.pop()


def standing_for(peers: Sequence[int], each: int = 1) -> AbstractContextManager[object]:
    """Accounts a send inside as `each` sends to each of `peers`, ranks of its group: for a simulated world."""
    return _pushed(_sends, (peers, each))


def current_sends() -> tuple[Sequence[int], int]:
    """Returns the peers of the innermost `standing_for` and the sends to each; no peers outside any."""
    return _sends[-1] if _sends else ((), 1)


def current_collective() -> tuple[str, str]:
    """Returns the innermost logical collective and unit, or empty strings outside any."""
    return _collectives[-1][:2] if _collectives else ("", "")


def current_operation() -> int:
    """Returns the number of the innermost logical collective, from 1, or 0 outside any."""
    return _collectives[-1][2] if _collectives else 0
