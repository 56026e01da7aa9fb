"""Events that a dispatch mode does not see: operators in other threads, collectives that are passed directly to a
process group's backend, changes of a storage's size, and the beginning and end of an optimizer's step.

Modes are per thread. A thread that is started while its starter is observed gets relays of the modes; the engine's own
threads (labels.EngineThread) do not: they allocate next to nothing, at times that vary between runs. Their sends are
seen nevertheless (labels.followed). Operators that no relay sees (C++ threads) are included in the allocator's total
(allocator.py) and in the bytes on the network interface (`loopback_bytes`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ..fake.compiler import GraphMode
from ..zero import labels
from .collective_operators import RULES

RAW = {name.removesuffix("_"): name for name in RULES if name.endswith("_") or name == "send"}
"""Backend method -> the operator that calls it, whose rule counts it (traffic.py)."""

Note = Callable[[str, tuple[Any, ...], int], None]


class Relay(GraphMode):
    """Passes another thread's operators to a mode that was entered in its own thread, while the mode is in `modes`."""

    def __init__(self, modes: list[TorchDispatchMode], place: int) -> None:
        super().__init__()
        self._modes, self._place = modes, place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for mode in self._modes[self._place : self._place + 1]:
            return mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))  # a thread may outlive what has observed it


@contextmanager
def threads_relayed(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Gives threads started inside the block relays of `modes`, the outermost first, which end with the block."""
    start, listening = threading.Thread.start, list(modes)

    def start_relayed(thread: threading.Thread) -> None:
        if not isinstance(thread, labels.EngineThread):
            thread.run = _relayed(thread.run, listening)  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_relayed  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        listening.clear()


def _relayed(run: Callable[[], None], modes: list[TorchDispatchMode]) -> Callable[[], None]:
    def run_relayed() -> None:
        with ExitStack() as stack:
            for place in range(len(modes)):
                stack.enter_context(Relay(modes, place))
            run()

    return run_relayed


@contextmanager
def resizes_watched(meet: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Calls `meet(storage)` when a storage was resized, as FSDP2's and our stage 3's parameters are."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        meet(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextmanager
def optimizer_steps_watched(tell: Callable[[bool], None]) -> Iterator[None]:
    """Calls `tell(True)` before any optimizer's step and `tell(False)` after it."""
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: tell(True)),
        register_optimizer_step_post_hook(lambda *_: tell(False)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def backends_watched(note: Note) -> Iterator[None]:
    """Calls `note(operator, arguments, ranks)` for collectives that Python passes directly to a backend, for which no
    operator is dispatched. torch.distributed's collectives reach the backend from C++, not through this path.
    """
    backend: Any = torch._C._distributed_c10d.Backend  # the base class of all, of Python's as well
    with ExitStack() as stack:  # mock puts back what the class itself holds: a method that binds
        for name in filter(partial(hasattr, backend), RAW):
            stack.enter_context(mock.patch.object(backend, name, _noted(getattr(backend, name), RAW[name], note)))
        yield


def _noted(method: Callable[..., Any], operator: str, note: Note) -> Callable[..., Any]:
    @wraps(method)
    def call(backend: Any, *args: Any, **kwargs: Any) -> Any:
        note(operator, (*args, *kwargs.values()), backend.size())
        return method(backend, *args, **kwargs)

    return call
