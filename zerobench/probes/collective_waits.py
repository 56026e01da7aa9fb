"""Waits for collectives that Python launches and waits for itself: a process group's method returns a *work*, whose
`wait` returns when the collective is done.

Our engine's collectives are told by its handles (zero/comm/streams.py), of which one may wait for many works. What C++
launches or waits for by itself, as DDP's reducer does, is not seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch

from ..zero import labels

BY_NO_HANDLE = ("", "control")
"""Logical collectives that no handle of the engine waits for."""

LAUNCHES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
"""Methods of a process group that launch a collective; of other versions of torch those that there are."""


@contextmanager
def works_watched(launched: Callable[[], int | None], waited: Callable[[int], None]) -> Iterator[None]:
    """Calls `waited(operation)` when a wait for a work has returned, the first for each.

    `launched`: number of the operation that was launched last on this thread, or None.
    """
    c10d: Any = torch._C._distributed_c10d
    works: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # weak: a work that lives on may keep its tensors alive
    launches = [name for name in LAUNCHES if hasattr(c10d.ProcessGroup, name)]
    with ExitStack() as stack:
        for kind in _kinds(c10d.Work):
            if "wait" in vars(kind):
                stack.enter_context(mock.patch.object(kind, "wait", _told(kind.wait, waited, works)))
        for name in launches:
            followed = _followed(getattr(c10d.ProcessGroup, name), launched, works)
            stack.enter_context(mock.patch.object(c10d.ProcessGroup, name, followed))
        yield


def _kinds(work: Any) -> list[Any]:
    """Returns a class of works and all below it: some wait in a way of their own."""
    return [work, *(one for below in work.__subclasses__() for one in _kinds(below))]


def _told(wait: Callable[..., Any], waited: Callable[[int], None], works: WeakKeyDictionary[Any, int]) -> Any:
    @wraps(wait)
    def wait_and_tell(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        operation = works.pop(work, None)
        if operation is not None:
            waited(operation)
        return result

    return wait_and_tell


def _followed(
    method: Callable[..., Any], launched: Callable[[], int | None], works: WeakKeyDictionary[Any, int]
) -> Callable[..., Any]:
    @wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        before = launched()
        work = method(group, *args, **kwargs)
        operation = launched()
        if work is not None and operation not in (None, before) and labels.current_collective()[0] in BY_NO_HANDLE:
            works[work] = operation
        return work

    return call
