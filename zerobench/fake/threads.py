"""The engine's own thread, at whose start its work is done: FakeTensorMode is for one thread.

As the thread itself, the work is followed by no instrument, but labels and transfers are heard of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import _disable_current_modes

from ..zero.optim import delayed_update


class DoneAtStart:
    """Stands for a thread. `modes`: those that its work runs under, the outermost first."""

    def __init__(
        self, modes: list[AbstractContextManager[Any]], target: Callable[..., None], args: tuple[Any, ...], name: str
    ) -> None:
        self._modes, self._work = modes, partial(target, *args)

    def start(self) -> None:
        """Does the work."""
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            for mode in self._modes:
                stack.enter_context(mode)
            self._work()

    def join(self) -> None:
        """Returns: it is done."""


@contextmanager
def threads_done_at_start(*modes: AbstractContextManager[Any]) -> Iterator[None]:
    """Runs delayed updates where they are launched."""
    with mock.patch.object(delayed_update, "Thread", partial(DoneAtStart, list(modes))):
        yield
