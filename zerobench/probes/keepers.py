"""Keepers: the Python object that keeps a grown storage alive, and the line that adds to it.

A storage that outlives its step often has a tensor in a list, a dict or an attribute. The garbage collector knows which
objects refer to the tensor, the frames on the stack their names, and the sources the lines that add to such a name.
Tensors that only an autograd graph keeps have no Python object; then the kept tensor with a graph is named, if it grew.
"""

from __future__ import annotations

import gc
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from .intervals import StorageRecord
from .source_lines import shown_path

CONTAINERS = (list, dict, set, deque)
ADDS = r"\s*(?:\.(?:append|appendleft|extend|insert|add|update|setdefault)\(|\[[^]]*\]\s*=(?!=)|\+=)"
"""What follows a container's name on a line that adds to it."""


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


def keepers_of(
    record_of: Callable[[torch.Tensor], StorageRecord | None], grown: set[StorageRecord]
) -> dict[StorageRecord, str]:
    """Returns storage -> its keeper, as "the list losses (train.py:12)". `grown`: the storages that are asked for."""
    found: dict[StorageRecord, str] = {}
    with_graph = ""
    for tensor in list(living_tensors()) if grown else ():
        stored = record_of(tensor) if tensor.layout == torch.strided else None
        if stored in grown and stored is not None and stored not in found and (keeper := _keeper_of(tensor)):
            found[stored] = keeper
            with_graph = with_graph or (keeper if tensor.grad_fn is not None else "")
    if with_graph:
        found |= dict.fromkeys(grown - found.keys(), f"a graph, by {with_graph}")
    return found


def _keeper_of(tensor: torch.Tensor) -> str:
    """Names the container that holds a tensor, directly or in a tuple; empty if it has no name."""
    for one in gc.get_referrers(tensor):
        holders = gc.get_referrers(one) if isinstance(one, tuple) else [one]
        for holder in holders:
            if isinstance(holder, CONTAINERS) and (named := _name_of(holder)):
                name, file = named
                line = _line_that_adds(name.rpartition(".")[2], file)
                return f"the {type(holder).__name__} {name}" + (f" ({line})" if line else "")
    return ""


def _name_of(container: Any) -> tuple[str, str] | None:
    """Returns a container's name, "losses" or "Logger.losses", and the file where it has it."""
    for frame in _frames():
        for names in (frame.f_locals, frame.f_globals):
            name = next((name for name, value in names.items() if value is container), "")
            if name and not name.startswith("__"):
                return name, frame.f_code.co_filename
    for owner in gc.get_referrers(container):
        owners = gc.get_referrers(owner) if isinstance(owner, dict) else [owner]
        for one in (owner, *owners):
            attributes = getattr(one, "__dict__", None)
            if not isinstance(attributes, dict) or isinstance(one, type):
                continue
            name = next((name for name, value in attributes.items() if value is container), "")
            module = one if isinstance(one, ModuleType) else sys.modules.get(type(one).__module__)
            if name and module is not None:
                shown = name if isinstance(one, ModuleType) else f"{type(one).__name__}.{name}"
                return shown, getattr(module, "__file__", None) or ""
    return None


def _frames() -> Iterator[FrameType]:
    """Yields the frames on the stack that are neither torch's, the standard library's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    package = str(Path(__file__).parents[1])
    while frame is not None:
        file = frame.f_code.co_filename
        if shown_path(file) is not None and not file.startswith(package):
            yield frame
        frame = frame.f_back


def _line_that_adds(name: str, file: str) -> str:
    """Returns the only line that adds to a name, in its file or a file on the stack; empty if there are others."""
    adds = re.compile(rf"\b{re.escape(name)}{ADDS}")
    found = set()
    for path in {file, *(frame.f_code.co_filename for frame in _frames())}:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            continue
        found |= {f"{shown_path(path) or path}:{number}" for number, line in enumerate(lines, 1) if adds.search(line)}
    return found.pop() if len(found) == 1 else ""
