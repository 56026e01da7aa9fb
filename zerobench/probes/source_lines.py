"""Lines of code that make storages, and the Python objects that keep them.

A storage is made by the innermost frame outside of torch, the standard library and the instruments. In backward that
frame is often only the call of `backward`; then it is the line of the forward whose gradient is computed: autograd
numbers its nodes in the order in which forward makes them, and backward reports which one it runs.

    forward       line of each operator, kept under the number of the node that autograd has just made for it
    backward      number of the running node -> that line, marked BACKWARD_OF
    graphs        code written by inductor is attributed to the line that called the compiled block
    hooks         a frame above the call of `backward` belongs to a hook, and counts like any other

A storage that outlives its step often has a tensor in a list, a dict or an attribute, its *keeper*. The garbage
collector knows which objects refer to the tensor, the frames on the stack their names, and the sources the lines that
add to such a name. Tensors that only an autograd graph keeps have no Python object; then the kept tensor with a graph
is named, if it grew.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import sysconfig
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from .intervals import StorageRecord

BACKWARD_OF = "backward of "
"""Prefix of a forward's line if its gradient made the storage."""

INSTRUMENTS = tuple(
    str(Path(__file__).parents[1] / name)
    for name in ("probes", "watching", "fake", "zero/labels.py", "models/compiled.py")
)
GENERATED = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(Path(tempfile.gettempdir()) / "torchinductor_")
"""Beginning of the paths of inductor's code."""
TORCH = str(Path(torch.__file__).parent)
STANDARD = sysconfig.get_path("stdlib")
PACKAGE = str(Path(__file__).parents[1])
INSTALLED = "site-packages"

_BACKWARD = (torch.autograd.graph.__file__, "_engine_run_backward")


class SourceLines:
    """Names lines, and keeps the forward's lines by the number of autograd's node until `forget`."""

    silent = False
    """True while storages are registered that were made earlier, by other lines."""

    def __init__(self) -> None:
        self._of_node: dict[int, str] = {}

    def see_operator(self) -> None:
        """Records the line of the dispatched operator, if autograd has made a node for it. The node is made before its
        operator is dispatched, so the first operator after it belongs to it.
        """
        if torch.is_grad_enabled() and (number := torch._C._autograd._get_sequence_nr() - 1) not in self._of_node:
            self._of_node[number] = self.here()

    def here(self) -> str:
        """Returns the running line, as "train.py:12 in step"; empty if no frame is the user's."""
        frame: FrameType | None = None if self.silent else sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if (code.co_filename, code.co_name) == _BACKWARD and (line := self._line_of_backward()):
                return line
            if (shown := shown_path(code.co_filename)) is not None:
                return f"{shown}:{frame.f_lineno} in {code.co_qualname}"
            frame = frame.f_back
        return (
            "" if self.silent else self._line_of_backward()
        )  # on CUDA, autograd's threads have no Python frames below

    def forget(self) -> None:
        """Forgets the lines of the nodes, at the end of a step."""
        self._of_node.clear()

    def _line_of_backward(self) -> str:
        node = torch._C._current_autograd_node()
        line = self._of_node.get(node._sequence_nr()) if node is not None else None
        return f"{BACKWARD_OF}{line}" if line else ""


@cache
def shown_path(filename: str) -> str | None:
    """Returns a file's path for display, or None for files of torch, the standard library and the instruments. Below
    the working directory it is relative to that, in an installed package to the folder of packages.
    """
    if filename.startswith("<") and not filename.startswith(("<ipython", "<stdin")):
        return None
    if filename.startswith((TORCH, GENERATED, *INSTRUMENTS)):
        return None
    path = Path(filename)
    if INSTALLED in path.parts:
        return str(Path(*path.parts[path.parts.index(INSTALLED) + 1 :]))
    if filename.startswith(STANDARD):
        return None
    if filename.startswith(PACKAGE):
        return str(path.relative_to(Path(PACKAGE).parent))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


CONTAINERS = (list, dict, set, deque)
ADDS = r"\s*(?:\.(?:append|appendleft|extend|insert|add|update|setdefault)\(|\[[^]]*\]\s*=(?!=)|\+=)"
"""Pattern of the text behind a container's name on a line that adds to the container."""


def living_tensors() -> Iterator[torch.Tensor]:
    """Yields every tensor that the garbage collector knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when their class is asked for
        kinds: dict[type, bool] = {}
        for candidate in gc.get_objects():
            kind = type(candidate)
            if kind not in kinds:
                kinds[kind] = issubclass(kind, torch.Tensor) and not kind.__name__.startswith("Fake")
            if kinds[kind]:
                yield candidate


def find_keepers(
    record_of: Callable[[torch.Tensor], StorageRecord | None], grown: set[StorageRecord]
) -> dict[StorageRecord, str]:
    """Returns storage -> its keeper, as "the list losses (train.py:12)". `grown`: the storages that are asked for."""
    keepers: dict[StorageRecord, str] = {}
    with_graph = ""
    for tensor in list(living_tensors()) if grown else ():
        stored = record_of(tensor) if tensor.layout == torch.strided else None
        if stored in grown and stored is not None and stored not in keepers and (keeper := _keeper(tensor)):
            keepers[stored] = keeper
            with_graph = with_graph or (keeper if tensor.grad_fn is not None else "")
    if with_graph:
        keepers |= dict.fromkeys(grown - keepers.keys(), f"a graph, by {with_graph}")
    return keepers


def _keeper(tensor: torch.Tensor) -> str:
    """Names the container that holds a tensor, directly or in a tuple; empty if it has no name."""
    for referrer in gc.get_referrers(tensor):
        for holder in gc.get_referrers(referrer) if isinstance(referrer, tuple) else [referrer]:
            if isinstance(holder, CONTAINERS) and (named := _container_name(holder)):
                name, file = named
                # the only line that adds to this name, in its file or a file on the stack
                adds, added_at = re.compile(rf"\b{re.escape(name.rpartition('.')[2])}{ADDS}"), set[str]()
                for path in {file, *(frame.f_code.co_filename for frame in _frames())}:
                    with suppress(OSError, ValueError):
                        lines = Path(path).read_text(encoding="utf-8").splitlines()
                        numbers = (number for number, line in enumerate(lines, 1) if adds.search(line))
                        added_at |= {f"{shown_path(path) or path}:{number}" for number in numbers}
                return f"the {type(holder).__name__} {name}" + (f" ({added_at.pop()})" if len(added_at) == 1 else "")
    return ""


def _container_name(container: Any) -> tuple[str, str] | None:
    """Returns a container's name, "losses" or "Logger.losses", and the file in which it has this name."""
    for frame in _frames():
        for names in (frame.f_locals, frame.f_globals):
            name = next((name for name, value in names.items() if value is container), "")
            if name and not name.startswith("__"):
                return name, frame.f_code.co_filename
    for owner in gc.get_referrers(container):
        owners = gc.get_referrers(owner) if isinstance(owner, dict) else [owner]
        for candidate in (owner, *owners):
            attributes, kind = getattr(candidate, "__dict__", None), type(candidate)
            if not isinstance(attributes, dict) or isinstance(candidate, type):
                continue
            name = next((name for name, value in attributes.items() if value is container), "")
            is_module = isinstance(candidate, ModuleType)
            module = candidate if is_module else sys.modules.get(kind.__module__)
            if name and module is not None:
                return name if is_module else f"{kind.__name__}.{name}", getattr(module, "__file__", None) or ""
    return None


def _frames() -> Iterator[FrameType]:
    """Yields the frames on the stack that are neither torch's, the standard library's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if shown_path(file) is not None and not file.startswith(PACKAGE):
            yield frame
        frame = frame.f_back
