"""Source lines: which line of code made a storage.

A storage is made by the innermost frame outside of torch, the standard library and the instruments. In backward that
frame is often only the call of `backward`; then it is the line of the forward whose gradient is computed: autograd
numbers its nodes in the order in which forward makes them, and backward reports which one it runs.

    forward       line of each operator, kept under the number of the node that autograd has just made for it
    backward      number of the running node -> that line, marked BACKWARD_OF
    graphs        code written by inductor is attributed to the line that called the compiled block
    hooks         a frame above the call of `backward` belongs to a hook, and counts like any other
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from types import FrameType

import torch

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
        """Records the line of the dispatched operator, if autograd has made a node for it.

        The node is made before its operator is dispatched, so the first operator after it belongs to it.
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
        )  # on CUDA autograd's threads have no frames of Python's below

    def forget(self) -> None:
        """Forgets the lines of the nodes, at the end of a step."""
        self._of_node.clear()

    def _line_of_backward(self) -> str:
        node = torch._C._current_autograd_node()
        line = self._of_node.get(node._sequence_nr()) if node is not None else None
        return f"{BACKWARD_OF}{line}" if line else ""


@cache
def shown_path(filename: str) -> str | None:
    """Returns a file's path for display, or None for files of torch, the standard library and the instruments.

    Below the working directory it is relative to that, in an installed package to the folder of packages.
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
