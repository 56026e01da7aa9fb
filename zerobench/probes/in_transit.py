"""Tensors in transit: passed to a collective, and kept by a backend thread a moment longer than by the loop.

gloo's thread drops its references only after it has reported completion, within milliseconds on a busy machine. If it
still has them when the next storage is made, they would sometimes count and sometimes not, so the ledger waits for it.
Two counts show who has a tensor: *holders* of its Python object, and *references* to the C++ tensor, one each for the
Python object, autograd, every view and gloo's thread.

    1 given      to a collective, by a caller with the only Python object; other tensors have owners that keep them
    2 held       by the loop: one holder or more. If there is one reference, the thread is done with the tensor
    3 dropped    no holder: only the thread has it, or a view of the loop's, which a wait in vain shows
    4 entering   the thread waits for Python's lock, to drop the object of a tensor or of its storage. Seen from Python
                 such a tensor looks like one that the loop holds
    5 gone       it can no longer be referenced

A functional collective makes its output itself, and may be the only owner of its input. When the caller has waited for
the output, the thread still holds both; the output is the last reference that it drops. The number of owners after that
is learned: the smallest that was seen for an output of this shape and dtype.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .labeling import plain_tensors_in

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
        self._fewest_owners: dict[object, int] = {}  # of outputs that the thread has dropped, by kind
        self._in_vain: set[object] = set()  # kinds and numbers of owners of outputs that have more

    def before_operator(self, is_collective: bool, args: Any, knows: Callable[[torch.Tensor], bool]) -> None:
        """Records a collective's tensors, and copies that gloo has made: unknown tensors can only come from gloo."""
        if is_collective:
            self.give(args)
        elif args and type(args[0]) is torch.Tensor and not knows(args[0]):
            self.give(args[0], always=True)

    def give(self, arguments: Any, always: bool = False) -> None:
        """Records tensors in a collective's arguments before it is called; `always`: even with other owners."""
        for tensor in plain_tensors_in(arguments):
            if tensor.device.type == "cpu" and (always or _references(tensor) <= IN_CALL):
                self._given.append(weakref.ref(tensor))

    def settle(self) -> None:
        """Waits until tensors that the loop has dropped are gone, and no thread is entering Python to drop one."""
        before, self._given = self._given, [given for given in self._given if not self._is_over(given)]
        if len(self._given) < len(before):
            end = time.perf_counter() + PATIENCE_S
            while waiting := threads_without_frame() - self._residents:
                if time.perf_counter() > end:
                    self._residents |= waiting
                time.sleep(LOOK_S)

    def _is_over(self, given: weakref.ref[torch.Tensor]) -> bool:
        """Returns True once a tensor is gone, or the thread is done with it; waits for one that the loop dropped."""
        for _ in range(LOOKS):
            if (tensor := given()) is None:
                return True
            references = _references(tensor)
            # minus this function's two, and torch's own reference to the object while the tensor has other references
            holders = sys.getrefcount(tensor) - 2 - (references > 1)
            del tensor
            if holders > 1 or (holders == 1 and references > 1):
                return references == 1
            if holders < 1:
                break
            time.sleep(LOOK_S)  # the only holder may be the thread, halfway through letting go
        else:
            return True

        end = time.perf_counter() + PATIENCE_S
        while (tensor := given()) is not None:
            shape, references = tensor.shape, _references(tensor)
            del tensor
            if references > MOST_HELD or (shape, references) in self._owned:
                break
            if time.perf_counter() > end:
                self._owned.add((shape, references))
            time.sleep(LOOK_S)
        return True

    def wait_for(self, output: torch.Tensor) -> None:
        """Waits until the thread has dropped the output of a functional collective that the caller has waited for."""
        if output.device.type != "cpu":
            return
        kind = output.shape, output.dtype
        fewest = self._fewest_owners.get(kind, 0)
        end = time.perf_counter() + (PATIENCE_S if fewest else FIRST_S)
        while (owners := _owners(output)) > fewest and (kind, owners) not in self._in_vain:
            if time.perf_counter() > end:
                if fewest:
                    self._in_vain.add((kind, owners))
                break
            time.sleep(LOOK_S)
        self._fewest_owners[kind] = min(owners, fewest or owners)


def threads_without_frame() -> set[int]:
    """Returns the threads that are attached to Python but run no Python code: mostly those waiting for its lock."""
    return set(sys._current_exceptions()) - set(sys._current_frames())


def _owners(tensor: torch.Tensor) -> int:
    """Counts the owners of a tensor and of its storage. (`_storage_Use_Count` is torch-private; tested.)"""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count + _references(tensor)


def _references(tensor: torch.Tensor) -> int:
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count
