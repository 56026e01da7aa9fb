"""Tensors in transit: passed to a collective, and kept by a backend thread a moment longer than by the loop.

gloo's thread drops its references only after it has reported completion, within milliseconds on a busy machine. If it
still has them when the next storage is made, they would sometimes count and sometimes not, so the ledger waits for it.

    given      to a collective by a caller with the only Python object; other tensors have owners that keep them anyway
    dropped    no Python object references it any more: only the thread does
    gone       the thread has dropped it too
    entering   the thread waits for Python's lock, to drop the Python object of a tensor or of its storage. Seen from
               Python such a tensor looks like one that the loop holds

A functional collective makes its output itself, and may be the only owner of its input. When the caller has waited for
the output, the thread still holds both until it drops the output, the last of its references.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

IN_CALL = 3
"""References to a tensor with one Python object while a collective is dispatched: the object's, and the call's two."""

PATIENCE_S = 0.5
"""Longest wait for one tensor: then it has another owner, such as a view, and tensors like it are not waited for."""

FIRST_S = 0.02
"""Wait for the first output of a kind, whose owners are not known yet; later ones correct a count that is too high."""

MOST_HELD = 6
"""References to a tensor that the thread has at most; 4 have been seen. With more it has another owner."""

LOOKS, LOOK_S = 3, 2e-5
"""Checks of a tensor with one holder, and seconds between two, in which the thread can take Python's lock."""


class InTransit:
    """Tensors that were passed to collectives by the main thread."""

    def __init__(self) -> None:
        self._given: list[weakref.ref[torch.Tensor]] = []
        self._owned: set[tuple[torch.Size, int]] = set()  # shapes and references of those that were waited for in vain
        self._residents: set[int] = set()  # threads that stay attached to Python without running any of it
        self._owners: dict[object, int] = {}  # of an output that the thread has dropped: the fewest seen, by kind
        self._in_vain: set[object] = set()  # kinds and numbers of owners of outputs that have more

    def see(self, collective: bool, args: Any, knows: Callable[[torch.Tensor], bool]) -> None:
        """Records a collective's tensors, and copies that gloo has made: unknown tensors can only come from gloo."""
        if collective:
            self.give(args)
        elif args and type(args[0]) is torch.Tensor and not knows(args[0]):
            self.give(args[0], always=True)

    def give(self, arguments: Any, always: bool = False) -> None:
        """Records tensors in a collective's arguments before it is called; `always`: even with other owners."""
        if isinstance(arguments, torch.Tensor):
            if arguments.device.type == "cpu" and (always or _references(arguments) <= IN_CALL):
                self._given.append(weakref.ref(arguments))
        elif isinstance(arguments, tuple | list):
            for one in arguments:
                self.give(one, always)

    def wait_for(self, output: torch.Tensor) -> None:
        """Waits until the thread has dropped the output of a functional collective that the caller has waited for."""
        if output.device.type != "cpu":
            return
        kind = output.shape, output.dtype
        patience = PATIENCE_S if kind in self._owners else FIRST_S
        end, fewest = time.perf_counter() + patience, self._owners.get(kind, 0)
        while (owners := _owners(output)) > fewest and (kind, owners) not in self._in_vain:
            if time.perf_counter() > end:
                if fewest:
                    self._in_vain.add((kind, owners))
                break
            time.sleep(LOOK_S)
        self._owners[kind] = min(owners, fewest or owners)

    def settle(self) -> None:
        """Waits until tensors that the loop has dropped are gone."""
        if self._given:
            before, self._given = self._given, [one for one in self._given if not self._is_over(one)]
            if len(self._given) < len(before):
                # waits until no thread is entering Python
                end = time.perf_counter() + PATIENCE_S
                while waiting := threads_without_frame() - self._residents:
                    if time.perf_counter() > end:
                        self._residents |= waiting
                    time.sleep(LOOK_S)

    def _is_over(self, given: weakref.ref[torch.Tensor]) -> bool:
        """Returns True once the tensor is gone, or the thread is done with it; False while both reference it."""
        for _ in range(LOOKS):
            held = _python_holders(given)
            if held == 0:
                self._wait(given)
                return True
            if held > 1 or not _is_done_with(given):
                break
            time.sleep(LOOK_S)  # the one that holds it may be the thread, halfway through letting go
        return _is_done_with(given)

    def _wait(self, given: weakref.ref[torch.Tensor]) -> None:
        """Waits until a tensor that Python has dropped is gone, or is found to have another owner."""
        end = time.perf_counter() + PATIENCE_S
        while (alike := _like(given)) is not None and alike[1] <= MOST_HELD and alike not in self._owned:
            if time.perf_counter() > end:
                self._owned.add(alike)
            time.sleep(LOOK_S)


def threads_without_frame() -> set[int]:
    """Returns the threads that are attached to Python but run no Python code: mostly those waiting for its lock."""
    return set(sys._current_exceptions()) - set(sys._current_frames())


def _like(given: weakref.ref[torch.Tensor]) -> tuple[torch.Size, int] | None:
    tensor = given()
    return None if tensor is None else (tensor.shape, _references(tensor))


def _python_holders(given: weakref.ref[torch.Tensor]) -> int:
    """Counts the Python objects that reference a tensor.

    It is one too many while the thread, which is done with the tensor, waits for Python's lock to drop its object.
    """
    tensor = given()
    if tensor is None:
        return 0
    by_torch = _references(tensor) > 1  # then torch keeps the Python object, one reference
    return max(0, sys.getrefcount(tensor) - by_torch - 2)  # less those of this function


def _is_done_with(given: weakref.ref[torch.Tensor]) -> bool:
    tensor = given()
    return tensor is None or _references(tensor) == 1


def _owners(tensor: torch.Tensor) -> int:
    """Counts the owners of a tensor and of its storage. (`_storage_Use_Count` is torch-private; tested.)"""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count + _references(tensor)


def _references(tensor: torch.Tensor) -> int:
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count
