"""Saves and loads an engine's checkpoint, over all of its ranks.

`export_safetensors` writes the plain module's state as one safetensors file, on rank 0, unit by unit.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from .. import labels
from ..engine import ShardedEngine
from . import storage
from .consensus import Ranks, SaveHandle, ranks_of
from .contents import CheckpointLoad, before_load, tensors_in, tensors_of
from .facts import buffers_of, differences, facts_of, merge, names_of_one
from .safetensors import bytes_of, layout, sync
from .storage import Chunks, read_checkpoint, wanting_facts
from .trial_step import problems_of_step


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


class Chosen(NamedTuple):
    """The choices of a save: see `Strategy.save`."""

    user_state: Mapping[str, Any]
    exclude_frozen: bool
    without_gradients: bool


def save(engine: ShardedEngine, path: str | os.PathLike[str], asynchronous: bool, chosen: Chosen) -> SaveHandle | None:
    """Writes a checkpoint, as `Strategy.save` specifies."""
    engine.settle()
    ranks, folder = ranks_of(engine), Path(path).absolute()
    tensors, facts = ranks.agree(lambda: _take(engine, asynchronous, chosen))
    write = partial(_write, ranks, folder, tensors, facts)
    if asynchronous:
        ranks.in_flight = SaveHandle(write)
        return ranks.in_flight
    with labels.collective("control"):
        write()
    return None


def _take(engine: ShardedEngine, copy: bool, chosen: Chosen) -> tuple[Chunks, dict[str, Any]]:
    if engine.update.used and not chosen.without_gradients:
        raise ValueError(
            "save: there are gradients, which a checkpoint does not hold; save after step(), or with"
            " without_gradients=True, which leaves them in the engine and out of the checkpoint"
        )
    engine.schedule.check_saveable()
    return tensors_of(engine, copy, chosen.exclude_frozen), facts_of(engine, chosen.user_state, chosen.exclude_frozen)


def _write(ranks: Ranks, path: Path, tensors: Chunks, facts: dict[str, Any]) -> None:
    """Writes the files over the ranks: see storage.py. Each step ends with an exchange, so that all learn of a failure.

    Raises RuntimeError, with the same message on all ranks.
    """
    with ExitStack() as held:
        _write_held(ranks, path, tensors, facts, held)


def _write_held(ranks: Ranks, path: Path, tensors: Chunks, facts: dict[str, Any], held: ExitStack) -> None:
    is_first, made = ranks.rank == 0, ""
    try:
        # 1 rank 0 makes the folder
        made = ranks.each(lambda: storage.begin(path, held) if is_first else "")[0]
        # 2 each rank writes its tensors, and sends its facts
        written = ranks.each(lambda: [storage.write(Path(made), ranks.rank, tensors), facts])
        # 3 rank 0 writes the index, and makes the folder the checkpoint
        files = {name: size for each, _ in written for name, size in each.items()}
        ranks.each(
            lambda: (
                storage.finish(Path(made), path, merge([facts for _, facts in written]), files) if is_first else None
            )
        )
    except Exception as error:
        if is_first and made:
            shutil.rmtree(made, ignore_errors=True)
        raise RuntimeError(f"save: {path} was not written: {error}") from error


def _problems_of_steps(engine: ShardedEngine, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields why a step after the load would raise, with the options of the groups or of a pending update."""
    pending = facts["extra"].get("pending") or {}
    for options in (facts["optimizer"]["options"], pending.get("options")):
        if options is not None:
            yield from problems_of_step(engine, facts["optimizer"]["states"], options)


def load(engine: ShardedEngine, path: str | os.PathLike[str], strict: bool) -> dict[str, Any]:
    """Reads a checkpoint, as `Strategy.load` specifies."""
    engine.settle()
    ranks, folder = ranks_of(engine), Path(path).absolute()
    # on all ranks before anything is changed
    loading = ranks.agree(lambda: _check(engine, folder, strict), files=lambda loading: loading.files)
    engine.zero_grad()
    before_load(engine)
    with labels.collective("control"):
        try:
            ranks.each(loading.read)
        except RuntimeError as error:
            raise RuntimeError(f"load: {folder} was not read: {error}") from error
    return loading.finish()


def _check(engine: ShardedEngine, folder: Path, strict: bool) -> CheckpointLoad:
    """Prepares a load. Raises ValueError if the checkpoint is damaged, or for another model or optimizer."""
    saved = read_checkpoint(folder, tensors_in(engine.module))
    with wanting_facts(folder):
        found, missing = differences(engine, saved.facts, saved.tensors), names_of_one(engine, saved.facts)
        for sentence in chain(missing if strict else (), found, _problems_of_steps(engine, saved.facts)):
            raise ValueError(f"{folder}: {sentence}")
        if not strict and engine.comm.is_first and (left := [*names_of_one(engine, saved.facts)]):
            warnings.warn(f"load: {folder}: {'; '.join(left)}", stacklevel=5)
        return CheckpointLoad(engine, saved)
