"""Saves and loads an engine's checkpoint with DCP's planners and storage.

`export_safetensors` writes the plain module's state as one safetensors file, on rank 0, unit by unit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch.distributed.checkpoint.metadata import Metadata

from .. import labels
from ..engine import ShardedEngine
from . import operations
from .around_load import before_load
from .consensus import Ranks, SaveHandle, ranks_of
from .contents import Targets, tensors_of
from .index import check_files, read_index
from .metadata import buffers_of, differences, facts_of, merge
from .operations import Flat, LoadPlanner, SavePlanner
from .safetensors import bytes_of, layout, sync
from .storage import FolderReader, FolderWriter
from .weights import load_weights

__all__ = ["SaveHandle", "export_safetensors", "load", "load_weights", "save"]


def export_safetensors(engine: ShardedEngine, path: str | os.PathLike[str]) -> None:
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
    """An export that is being written: under another name until it is complete."""

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


def save(
    engine: ShardedEngine, path: str | os.PathLike[str], asynchronous: bool, user_state: Mapping[str, Any]
) -> SaveHandle | None:
    """Writes a checkpoint, as `Strategy.save` specifies."""
    engine.settle()
    ranks, folder = ranks_of(engine), Path(path).absolute()
    tensors, facts = ranks.agree(lambda: _take(engine, asynchronous, user_state))
    write = partial(_write, ranks, FolderWriter(folder), SavePlanner(facts, merge), tensors)
    if asynchronous:
        ranks.in_flight = SaveHandle(write)
        return ranks.in_flight
    with labels.collective("control"):
        write()
    return None


def load(engine: ShardedEngine, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a checkpoint, as `Strategy.load` specifies."""
    engine.settle()
    ranks, folder = ranks_of(engine), Path(path).absolute()
    # Everything is checked on all ranks before anything is changed; each rank hashes every Nth file.
    metadata = ranks.agree(lambda: _check(engine, folder, slice(ranks.rank, None, ranks.size)))
    engine.zero_grad()
    before_load(engine)
    targets = Targets(engine, metadata.planner_data, _pending_in(metadata))
    planner, reader = LoadPlanner(), FolderReader(folder, metadata)
    with labels.collective("control"):
        _run(f"load: {folder} was not read", partial(operations.load, ranks, targets.flats, reader, planner))
    targets.finish()
    return metadata.planner_data["user"]


def _take(engine: ShardedEngine, copy: bool, user_state: Mapping[str, Any]) -> tuple[dict[str, Flat], dict[str, Any]]:
    if engine.update.used:
        raise ValueError("save: there are gradients, which a checkpoint does not hold; save after step()")
    engine.schedule.check_saveable()
    return tensors_of(engine, copy), facts_of(engine, user_state)


def _write(ranks: Ranks, writer: FolderWriter, planner: SavePlanner, tensors: dict[str, Flat]) -> None:
    try:
        _run(f"save: {writer.path} was not written", partial(operations.save, ranks, tensors, writer, planner))
    except RuntimeError:
        writer.abandon()
        raise


def _check(engine: ShardedEngine, folder: Path, share: slice) -> Metadata:
    """Returns the checkpoint's metadata. Raises ValueError if it is damaged, or for another model or optimizer."""
    metadata = read_index(folder)
    for sentence in differences(engine, metadata):
        raise ValueError(f"{folder}: {sentence}")
    check_files(folder, metadata, share)
    return metadata


def _pending_in(metadata: Metadata) -> dict[str, torch.dtype]:
    """Returns parameter name -> dtype of its pending gradient, for the pending gradients in the checkpoint."""
    found: dict[str, Any] = metadata.state_dict_metadata
    head = "pending."
    return {name[len(head) :]: kind.properties.dtype for name, kind in found.items() if name.startswith(head)}


def _run(failure: str, operation: Callable[[], None]) -> None:
    """Runs an operation over the ranks. Raises RuntimeError, with the same message on all ranks, if it fails."""
    try:
        operation()
    except Exception as error:
        raise RuntimeError(f"{failure}: {error}") from error
