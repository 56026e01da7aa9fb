"""Events that a dispatch mode does not see: operators in other threads, changes of a storage's size, the beginning and
end of an optimizer's step, and the orthogonalizations of Muon.

Modes are per thread. A thread that is started while its starter is observed gets relays of the modes; the engine's own
threads (labels.EngineThread) do not: they allocate next to nothing, at times that vary between runs. Their sends are
seen nevertheless (labels.followed). Operators that no relay sees (C++ threads) are included in the allocator's total
(allocator.py) and in the bytes on the network interface (`loopback_bytes`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.optim import _muon
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ..fake.compiler import GraphMode
from ..zero import labels
from ..zero.optim.segments import muon_cost


class Relay(GraphMode):
    """Passes another thread's operators to mode number `index`, while it exists in `modes`."""

    def __init__(self, modes: list[TorchDispatchMode], index: int) -> None:
        super().__init__()
        self._modes, self._index = modes, index

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for mode in self._modes[self._index : self._index + 1]:
            return mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))  # a thread may outlive what has observed it


@contextmanager
def threads_relayed(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Gives threads started inside the block relays of `modes`, the outermost first, which end with the block."""
    start, listening = threading.Thread.start, list(modes)

    def run_relayed(run: Callable[[], None]) -> None:
        with ExitStack() as stack:
            for index in range(len(listening)):
                stack.enter_context(Relay(listening, index))
            run()

    def start_relayed(thread: threading.Thread) -> None:
        if not isinstance(thread, labels.EngineThread):
            thread.run = partial(run_relayed, thread.run)  # type: ignore[method-assign]
        start(thread)

    with mock.patch.object(threading.Thread, "start", start_relayed):
        try:
            yield
        finally:
            listening.clear()


@contextmanager
def resizes_watched(meet: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Calls `meet(storage)` when a storage was resized, as FSDP2's and our stage 3's parameters are."""
    resize = torch.UntypedStorage.resize_

    def resize_and_meet(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        meet(storage)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_and_meet):
        yield


@contextmanager
def optimizer_steps_watched(notify: Callable[[bool], None]) -> Iterator[None]:
    """Calls `notify(True)` before any optimizer's step and `notify(False)` after it."""
    before = register_optimizer_step_pre_hook(lambda *_: notify(True))
    after = register_optimizer_step_post_hook(lambda *_: notify(False))
    with before, after:
        yield


@contextmanager
def orthogonalizations_watched(notify: Callable[[int], None]) -> Iterator[None]:
    """Calls `notify(flops)`, with the FLOPs of all its iterations, for each of torch's Newton-Schulz calls."""
    orthogonalize = _muon._zeropower_via_newtonschulz  # torch-private, tested

    def notify_and_call(grad: torch.Tensor, coefficients: Any, steps: int, eps: float) -> torch.Tensor:
        notify(steps * muon_cost(grad.shape))
        return orthogonalize(grad, coefficients, steps, eps)

    with mock.patch.object(_muon, "_zeropower_via_newtonschulz", notify_and_call):
        yield
