"""Saves and loads an engine's checkpoint, over all of its ranks.

`export_safetensors` writes the plain module's state as one safetensors file, on rank 0, unit by unit.

[Note: weights alone]
`load_weights` loads weights, such as pretrained ones, into an existing engine. Each rank reads its own elements, in the
file's dtype, into its masters and its parts of frozen parameters; then parameters are refreshed from the masters, as
after `load`. Optimizer states, options and loss scale are unchanged; a delayed update (optim/delayed_update.py) is
dropped, since it belongs to the replaced weights. Weights on disk, from any program, are tensors by name, read range by
range:

    model.safetensors                 one file
    model.safetensors.index.json      an index of several files next to it, as transformers writes them
    a folder                          of either, or our own checkpoint: its masters, frozen parameters and buffers

Nothing is unpickled or executed; files of torch.save are refused. A file that is damaged or of another format is a
ValueError with a message that names the path.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import nn

from .. import labels
from ..engine import ShardedEngine
from . import storage
from .consensus import Ranks, SaveHandle, ranks_of
from .contents import CheckpointLoad, before_load, parts_of, put, tensors_in, tensors_of
from .facts import buffers_of, differences, facts_of, merge, names_of_one, problems_of_step
from .safetensors import (
    FLOATS,
    StoredTensor,
    bytes_of,
    layout,
    read_header,
    read_index,
    row_major,
    sync,
    without_collector,
)
from .storage import INDEX, Chunks, read_checkpoint, wanting_facts


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


# -- weights alone ---------------------------------------------------------------------------------------

READ = (
    "weights are read from a .safetensors file, an index of such files, a folder of either, or a checkpoint that"
    " engine.save wrote"
)
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class WeightFiles:
    """`tensors` by name; a checkpoint's user state, and the names of its files, which have the save's number."""

    path: Path
    tensors: dict[str, StoredTensor]
    user_state: dict[str, Any] = field(default_factory=dict)
    checkpoint_files: tuple[str, ...] = ()


@without_collector()
def find_weights(path: Path, count: int) -> WeightFiles:
    """Finds the weights at `path`, for a model of so many tensors."""
    if path.is_dir():
        if (path / INDEX).exists():
            saved = read_checkpoint(path, count)
            named = [(key.partition("."), tensor) for key, tensor in saved.tensors.items()]
            tensors = {name: tensor for (kind, _, name), tensor in named if kind in ("master", "frozen", "buffer")}
            return WeightFiles(path, tensors, saved.facts["user"], saved.files)
        path = _in_folder(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file or folder; {READ}")
    if path.suffix in PICKLED:
        raise ValueError(
            f"{path}: a {path.suffix} file is a pickle, which can run code and is not opened; {READ}: write it with"
            " safetensors.torch.save_file, or give torch.load(..., weights_only=True) to engine.module.load_state_dict"
        )
    if path.suffix == ".json":
        return WeightFiles(path, dict(_indexed(path, count)))
    return WeightFiles(path, read_header(path))


def _in_folder(folder: Path) -> Path:
    for name in ("model.safetensors.index.json", "model.safetensors"):
        if (folder / name).is_file():
            return folder / name
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        files = sorted(folder.glob(pattern))
        if len(files) == 1:
            return files[0]
        if files:
            raise ValueError(f"{folder}: it has {len(files)} of {pattern}, {files[0].name} and others; name one")
    raise ValueError(f"{folder}: there are no weights in it; {READ}")


def _indexed(path: Path, count: int) -> Iterator[tuple[str, StoredTensor]]:
    whole = read_index(path, count, "an index of safetensors files")
    try:
        names = whole["weight_map"]
        files = set(names.values())
    except (TypeError, KeyError, AttributeError) as error:
        words = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: it is not an index of safetensors files ({words!s:.80})") from None
    tensors: dict[Any, dict[str, StoredTensor]] = {}
    for name in files:
        if not isinstance(name, str) or Path(name).name != name or not (path.parent / name).is_file():
            raise ValueError(f"{path}: it names {name!r:.80}, which is not a file of its folder")
        tensors[name] = read_header(path.parent / name)
    for name, file in names.items():
        if name not in tensors[file]:
            raise ValueError(f"{path}: it says that {name} is in {file}, which does not have it")
        yield name, tensors[file][name]


class Keys(NamedTuple):
    """Names that the file lacks and names that the module lacks, as `module.load_state_dict` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_weights(engine: ShardedEngine, path: str | os.PathLike[str], strict: bool) -> tuple[Keys, dict[str, Any]]:
    """Loads weights, as `Strategy.load_weights` specifies; returns a checkpoint's user state too."""
    engine.settle()
    ranks = ranks_of(engine)
    files = ranks.agree(
        lambda: find_weights(Path(path).absolute(), tensors_in(engine.module)),
        files=lambda found: found.checkpoint_files,
    )
    keys, chosen = ranks.agree(lambda: _match(engine, files, strict))
    engine.zero_grad()
    before_load(engine, engine.schedule.describe_pending().get("steps", 0))
    with torch.no_grad(), labels.collective("control"):
        ranks.agree(lambda: _read(engine, chosen))
    engine.after_load()
    return keys, files.user_state


def _match(engine: ShardedEngine, files: WeightFiles, strict: bool) -> tuple[Keys, dict[torch.Tensor, StoredTensor]]:
    """Chooses a tensor of the file for each tensor of the module. Raises ValueError if they do not fit."""
    state = engine.module.state_dict(keep_vars=True)
    names: dict[torch.Tensor, list[str]] = {}
    for name, tensor in state.items():
        ignored = isinstance(tensor, nn.Parameter) and tensor not in engine.orders
        if isinstance(tensor, torch.Tensor) and not ignored:  # such files hold no extra state of modules
            names.setdefault(tensor, []).append(name)
    chosen: dict[torch.Tensor, StoredTensor] = {}
    missing: list[str] = []
    for tensor, own in names.items():
        there = [name for name in own if name in files.tensors]
        if not there:
            missing += own
            continue
        name = there[0]
        chosen[tensor] = stored = files.tensors[name]
        shape = stored.order.shape
        if shape != tuple(tensor.shape):
            raise ValueError(f"{files.path}: {name} has shape {list(shape)} there, {list(tensor.shape)} here")
        if stored.dtype != tensor.dtype and not {stored.dtype, tensor.dtype} <= FLOATS:
            raise ValueError(f"{files.path}: {name} has dtype {stored.dtype} there, {tensor.dtype} here")
    keys = Keys(missing, [name for name in files.tensors if name not in state])
    for other, words in zip(keys, ("lacks {}, which the module has", "has {}, which the module lacks"), strict=True):
        if strict and other:
            more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
            raise ValueError(f"{files.path}: it {words.format(other[0] + more)}; strict=False loads what both have")
    return keys, chosen


def _read(engine: ShardedEngine, chosen: dict[torch.Tensor, StoredTensor]) -> None:
    for part in parts_of(engine):
        if part.parameter in chosen and part.tensor.numel():
            order, stop = engine.orders[part.parameter], part.start + part.tensor.numel()
            part.tensor.copy_(chosen[part.parameter].part(order, part.start, stop))
    for buffer in engine.module.buffers():
        if buffer in chosen and buffer.numel():
            put(buffer, chosen[buffer].part(row_major(buffer.shape), 0, buffer.numel()).view(buffer.shape))
