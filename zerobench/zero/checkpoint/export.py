"""The plain module's state as one safetensors file, written by rank 0, unit by unit."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from .consensus import ranks_of
from .metadata import buffers_of
from .safetensors import bytes_of, layout, sync

if TYPE_CHECKING:
    from ..strategy import Strategy


def export_safetensors(engine: Strategy, path: str | os.PathLike[str]) -> None:
    """Writes one safetensors file, as `Strategy.export_safetensors` specifies."""
    engine.settle()
    ranks, target = ranks_of(engine), Path(path).absolute()
    file = ranks.agree(lambda: _ExportFile(engine.module, target) if ranks.rank == 0 else None)
    with torch.no_grad():
        for unit in engine.holders():
            with engine.whole(unit):
                if file is not None:
                    file.put(engine.parameters_of(unit))
    ranks.agree(lambda: file.finish() if file is not None else None)


class _ExportFile:
    """The export while it is written: under another name until it is complete."""

    def __init__(self, module: torch.nn.Module, path: Path) -> None:
        buffers_of(module)  # refuses extra state
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial-{uuid4().hex[:8]}")
        self._values: dict[str, Any] = module.state_dict(keep_vars=True)
        head, self._begins = layout(self._values)
        self._left = dict.fromkeys(self._values.values())  # not yet written
        self._names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in self._values.items():
            self._names.setdefault(tensor, []).append(name)
        self._error: OSError | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._partial.open("wb")
        self._file.write(head)

    def put(self, tensors: Iterable[torch.Tensor]) -> None:
        """Writes tensors at their offsets. An error is raised in `finish`: other ranks are still gathering units."""
        try:
            for tensor in tensors if self._error is None else ():
                self._left.pop(tensor, None)
                for name in self._names.get(tensor, ()):  # tied: under each of its names
                    self._file.seek(self._begins[name])
                    self._file.write(bytes_of(tensor))
        except OSError as error:
            self._error = error

    def finish(self) -> None:
        """Writes the tensors that belong to no unit and gives the file its name."""
        self.put(list(self._left))
        try:
            self._file.close()
            if self._error is not None:
                raise self._error
            sync([self._partial])
            os.replace(self._partial, self._path)
            sync([self._path.parent])
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            raise RuntimeError(f"export: {self._path} was not written: {error}") from error
