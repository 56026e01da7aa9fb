"""Tensors that are no part of a loop although they live while it runs: of tests that ran before, of other models.

A watch counts every tensor that lives as it begins, so that no byte of its loop is missed. In a process that has done
other work, that would make its figures depend on what the process has done. Within `leave_out`, the tensors that live
at its beginning are counted only if the loop uses them: as parameters, states, inputs or results of an operator.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..probes.labeling import parts_of

_apart: dict[int, StorageWeakRef] = {}
"""Address of a storage -> a weak reference to it, without which the address could be another one's by now."""


@contextmanager
def leave_out() -> Iterator[None]:
    """Leaves out of the watches in this block what lives as it begins."""
    gc.collect()  # what only circles hold is not alive
    _apart.clear()
    for one in living_tensors():
        for part in parts_of(one):
            if part.layout == torch.strided:
                storage = part.untyped_storage()
                _apart.setdefault(storage._cdata, StorageWeakRef(storage))
    try:
        yield
    finally:
        _apart.clear()


def is_apart(tensor: torch.Tensor) -> bool:
    """Returns True where the tensor is left out."""
    return tensor.untyped_storage()._cdata in _apart


def living_tensors() -> Iterator[torch.Tensor]:
    """Yields every tensor that the garbage collector knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when their class is asked for
        kinds: dict[type, bool] = {}
        for one in gc.get_objects():
            kind = type(one)
            if kind not in kinds:
                kinds[kind] = issubclass(kind, torch.Tensor) and not kind.__name__.startswith("Fake")
            if kinds[kind]:
                yield one
