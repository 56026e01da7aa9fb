"""Saves and loads an engine's checkpoint, over all of its ranks.

The ranks agree on each operation before anything is changed. They use their own gloo group, so that a save can run in a
thread during the training's collectives. Only one thread at a time uses it: a second operation waits for the save in
flight.

`export_safetensors` writes the plain module's state as one safetensors file, on rank 0, unit by unit.

[Note: only weights]
`load_weights` fills masters and frozen parameters, each rank its own elements, in the file's dtype. A delayed update
(optim/delayed_update.py) is dropped, since it belongs to the replaced weights. Weights on disk, from any program, are
tensors by name, read range by range:

    model.safetensors                 one file
    model.safetensors.index.json      an index of several files next to it, as transformers writes them
    a folder                          of either, or our own checkpoint: its masters, frozen parameters and buffers

Nothing is unpickled or executed; files of torch.save are refused.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from .. import labels
from ..comm.hierarchical import new_cpu_group
from ..engine import ShardedEngine
from . import contents, storage
from .storage import FLOATS, INDEX, Chunks, StoredTensor, bytes_of, layout, read_checkpoint, read_header

T = TypeVar("T")


# -- the ranks ------------------------------------------------------------------------------------------------------


class SaveHandle:
    """A save that runs in a thread."""

    def __init__(self, write: Callable[[], None]) -> None:
        self.seen = False
        self.ended = 0.0
        """`time.perf_counter()` at which the save ended, successfully or not; 0 while it runs."""
        threads = ThreadPoolExecutor(1, "checkpoint")
        self._written = threads.submit(self._run, write)
        threads.shutdown(wait=False)  # the thread ends with this save

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        finally:
            self.ended = time.perf_counter()

    def done(self) -> bool:
        """Returns True once the save has ended, successfully or not."""
        return self._written.done()

    def wait(self) -> None:
        """Returns when the checkpoint is complete and on the disk. Raises RuntimeError if it was not written."""
        error = self._written.exception()
        self.seen = True
        if error is not None:
            raise error


class Ranks:
    """The ranks that save and load together, and the save in flight. `group`: None for one rank."""

    def __init__(self, engine: ShardedEngine) -> None:
        self.in_flight: SaveHandle | None = None
        self._comm = comm = engine.comm
        if comm.group is not None and comm.group not in _groups:
            comm.meet("first checkpoint")
            _groups[comm.group] = new_cpu_group(comm)
        self.group = None if comm.group is None else _groups[comm.group]
        self.rank, self.size = (0, 1) if self.group is None else (dist.get_rank(self.group), comm.averaged_ranks)

    def agree(self, what: Callable[[], T], files: Callable[[T], Sequence[str]] = lambda value: ()) -> T:
        """Runs `what` on each rank. If it raises on one, all raise its message, as RuntimeError or ValueError. `files`:
        names of the files that a rank's value was read from. If the ranks' names differ, all raise ValueError.
        """
        error_type, text, value, names = "", "", None, []
        try:
            handle, self.in_flight = self.in_flight, None
            if handle is not None and not handle.seen:
                handle.wait()
            value = what()
            names = list(files(value))
        except Exception as error:  # of any kind: without the message the other ranks would wait for ever
            error_type = "runtime" if isinstance(error, RuntimeError) else "value"
            text = str(error) if isinstance(error, RuntimeError | ValueError | OSError) else repr(error)
        request = json.dumps([error_type, text, names])
        with labels.collective("control"):
            answers = self._comm.call("checkpoint", lambda: self._exchange(request), self.group)
        for error_type, text, _ in answers:
            if error_type:
                raise (RuntimeError if error_type == "runtime" else ValueError)(text)
        if any(others != names for _, _, others in answers):
            raise ValueError(
                "load: the ranks read different saves; was the checkpoint replaced meanwhile? Load it again"
            )
        return cast(T, value)

    def each(self, what: Callable[[], Any]) -> list[Any]:
        """Runs `what` on each rank; returns all ranks' values, which must be JSON values. If it raises on some ranks,
        all raise the first one's message with its rank, as RuntimeError.
        """
        why = None
        try:
            text = json.dumps([what(), None])
        except BaseException as error:  # of any kind: without the message the other ranks would wait for ever
            why = error
            text = json.dumps([None, str(error) or repr(error)])
        answers = self._exchange(text)
        for rank, (_, sentence) in enumerate(answers):
            if sentence is not None:
                raise RuntimeError(f"rank {rank}: {sentence}") from (why if rank == self.rank else None)
        return [value for value, _ in answers]

    def _exchange(self, value: str) -> list[Any]:
        """Returns the values of all ranks, which send JSON, in rank order. Nothing is unpickled."""
        text = value.encode()
        if self.group is None:
            return [json.loads(text)]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self.group)
        most = max(int(size) for size in sizes)
        texts = [torch.zeros(most, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.frombuffer(bytearray(text.ljust(most)), dtype=torch.uint8)
        dist.all_gather(texts, padded, group=self.group)
        return [json.loads(bytes(bytes_of(text))) for text in texts]  # JSON may end with spaces


_ranks: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()
_groups: WeakKeyDictionary[Any, dist.ProcessGroup] = WeakKeyDictionary()
"""An engine's group -> the same ranks' CPU group for checkpoints."""


def ranks_of(engine: ShardedEngine) -> Ranks:
    """Returns the engine's ranks; the first call creates their group and is collective."""
    if engine not in _ranks:
        _ranks[engine] = Ranks(engine)
    return _ranks[engine]


# -- checkpoints ---------------------------------------------------------------------------------------------------


def save(
    engine: ShardedEngine, path: str | os.PathLike[str], asynchronous: bool, user_state: Mapping[str, Any],
    exclude_frozen: bool, without_gradients: bool,
) -> SaveHandle | None:  # fmt: skip
    """Writes a checkpoint, as `Strategy.save` specifies."""
    engine.settle()
    ranks, folder = ranks_of(engine), Path(path).absolute()

    def take() -> tuple[Chunks, dict[str, Any]]:
        if engine.update.used and not without_gradients:
            raise ValueError(
                "save: there are gradients, which a checkpoint does not hold; save after step(), or with"
                " without_gradients=True, which leaves them in the engine and out of the checkpoint"
            )
        engine.update.check_saveable()
        tensors = contents.saved_tensors(engine, asynchronous, exclude_frozen)
        return tensors, contents.facts_of(engine, user_state, exclude_frozen)

    write = partial(_write, ranks, folder, *ranks.agree(take))
    if asynchronous:
        ranks.in_flight = SaveHandle(write)
        return ranks.in_flight
    with labels.collective("control"):
        write()
    return None


def _write(ranks: Ranks, path: Path, tensors: Chunks, facts: dict[str, Any]) -> None:
    """Writes the files over the ranks: see storage.py. Each step ends with an exchange, so that all learn of a failure.
    Raises RuntimeError, with the same message on all ranks.
    """
    is_first, folder = ranks.rank == 0, ""
    with ExitStack() as lock:
        try:
            # 1 rank 0 makes the folder
            folder = ranks.each(lambda: storage.begin(path, lock) if is_first else "")[0]
            # 2 each rank writes its tensors, and sends its facts
            written = ranks.each(lambda: [storage.write(Path(folder), ranks.rank, tensors), facts])
            # 3 rank 0 writes the index, and makes the folder the checkpoint
            files = {name: size for sizes, _ in written for name, size in sizes.items()}

            def finish() -> None:
                if is_first:
                    storage.finish(Path(folder), path, contents.merge([facts for _, facts in written]), files)

            ranks.each(finish)
        except Exception as error:
            if is_first and folder:
                shutil.rmtree(folder, ignore_errors=True)
            raise RuntimeError(f"save: {path} was not written: {error}") from error


def load(engine: ShardedEngine, path: str | os.PathLike[str], strict: bool) -> dict[str, Any]:
    """Reads a checkpoint, as `Strategy.load` specifies."""
    engine.settle()
    ranks, folder = ranks_of(engine), Path(path).absolute()
    # on all ranks before anything is changed
    loading = ranks.agree(lambda: _check(engine, folder, strict), files=lambda loading: loading.files)
    engine.zero_grad()
    contents.before_load(engine)
    with labels.collective("control"):
        try:
            ranks.each(loading.read)
        except RuntimeError as error:
            raise RuntimeError(f"load: {folder} was not read: {error}") from error
    return loading.finish()


def _check(engine: ShardedEngine, folder: Path, strict: bool) -> contents.CheckpointLoad:
    saved = read_checkpoint(folder, contents.tensors_in(engine.module))
    with storage.wanting_facts(folder):
        unmatched = [*contents.names_of_one(engine, saved.facts)]
        different = contents.differences(engine, saved.facts, saved.tensors)
        raising = contents.problems_of_step(engine, saved.facts)
        for problem in chain(unmatched if strict else (), different, raising):
            raise ValueError(f"{folder}: {problem}")
        if unmatched and engine.comm.is_first:
            warnings.warn(f"load: {folder}: {'; '.join(unmatched)}", stacklevel=5)
        return contents.CheckpointLoad(engine, saved)


# -- only weights ----------------------------------------------------------------------------------------

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


@storage.without_collector()
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
    whole = storage.read_index(path, count, "an index of safetensors files")
    try:
        names = whole["weight_map"]
        files = set(names.values())
    except (TypeError, KeyError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: it is not an index of safetensors files ({why!s:.80})") from None
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
        lambda: find_weights(Path(path).absolute(), contents.tensors_in(engine.module)),
        files=lambda weights: weights.checkpoint_files,
    )
    keys, chosen = ranks.agree(lambda: _match(engine, files, strict))
    engine.zero_grad()
    contents.before_load(engine, engine.update.describe_pending().get("steps", 0))

    def read() -> None:
        for part in contents.parts_of(engine):
            if part.parameter in chosen and part.tensor.numel():
                stop = part.start + part.tensor.numel()
                part.tensor.copy_(chosen[part.parameter].part(part.order, part.start, stop))
        for buffer in engine.module.buffers():
            if buffer in chosen and buffer.numel():
                values = chosen[buffer].part(storage.row_major(*buffer.shape), 0, buffer.numel())
                contents.put(buffer, values.view(buffer.shape))

    with torch.no_grad(), labels.collective("control"):
        ranks.agree(read)
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
        listed = [name for name in own if name in files.tensors]
        if not listed:
            missing += own
            continue
        name = listed[0]
        chosen[tensor] = stored = files.tensors[name]
        shape = stored.order.shape
        if shape != tuple(tensor.shape):
            raise ValueError(f"{files.path}: {name} has shape {list(shape)} there, {list(tensor.shape)} here")
        if stored.dtype != tensor.dtype and not {stored.dtype, tensor.dtype} <= FLOATS:
            raise ValueError(f"{files.path}: {name} has dtype {stored.dtype} there, {tensor.dtype} here")
    keys = Keys(missing, [name for name in files.tensors if name not in state])
    problems = ("lacks {}, which the module has", "has {}, which the module lacks")
    for unmatched, problem in zip(keys, problems, strict=True):
        if strict and unmatched:
            more = f" (and {len(unmatched) - 1} more)" if len(unmatched) > 1 else ""
            raise ValueError(
                f"{files.path}: it {problem.format(unmatched[0] + more)}; strict=False loads what both have"
            )
    return keys, chosen


# -- export --------------------------------------------------------------------------------------------------------


def export_safetensors(engine: ShardedEngine, path: str | os.PathLike[str]) -> None:
    """Writes one safetensors file, as `Strategy.export_safetensors` specifies."""
    engine.settle()
    ranks, target = ranks_of(engine), Path(path).absolute()
    file = ranks.agree(lambda: _ExportFile(engine.module, target) if ranks.rank == 0 else None)
    with torch.no_grad():
        for unit in engine.gathered_units():
            with engine.whole(unit):
                if file is not None:
                    file.put(engine.parameters_of(unit))
    ranks.agree(lambda: file.finish() if file is not None else None)


class _ExportFile:
    """An export that is being written: under another name until it is complete."""

    def __init__(self, module: torch.nn.Module, path: Path) -> None:
        contents.buffers_of(module)  # refuses extra state
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial-{uuid4().hex[:8]}")
        values: dict[str, Any] = module.state_dict(keep_vars=True)
        head, self._begins = layout(values)
        self._left = dict.fromkeys(values.values())  # not yet written
        self._names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in values.items():
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
            storage.sync([self._partial])
            os.replace(self._partial, self._path)
            storage.sync([self._path.parent])
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            raise RuntimeError(f"export: {self._path} was not written: {error}") from error
