"""Loads weights alone, such as pretrained ones, from safetensors or a checkpoint into an existing engine.

Each rank reads its own elements, in the file's dtype, into its masters and its parts of frozen parameters; then
parameters are refreshed from the masters, as after `load`. Optimizer states, options and loss scale are unchanged; a
delayed update (optim/delayed_update.py) is dropped, since it belongs to the replaced weights.

Weights on disk, from any program: tensors by name, whose elements are read range by range.

    model.safetensors                 one file
    model.safetensors.index.json      an index of several files next to it, as transformers writes them
    a folder                          of either, or our own checkpoint: its masters, frozen parameters and buffers

Nothing is unpickled or executed; files of torch.save are refused. Raises ValueError with a message that names the path,
for a file that is damaged or of another format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from .. import labels
from ..engine import ShardedEngine
from ..layout import MemoryOrder
from ..precision import flat_of
from .around_load import before_load, put
from .consensus import ranks_of
from .contents import sharded_frozen, whole_frozen
from .index import INDEX, check_files, read_index
from .metadata import is_order, saved_order
from .safetensors import DTYPES, NAMES, buffer_of

KNOWN = {name: dtype for dtype, name in NAMES.items()}
"""The format's name of a dtype -> dtype."""

MOST_HEADER = 10**8
"""Largest header in bytes that the format allows."""

READ = (
    "weights are read from a .safetensors file, an index of such files, a folder of either, or a checkpoint that"
    " engine.save wrote"
)
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Chunk:
    """Elements [start, start + numel) of a tensor, stored from byte `begin` of the file `path` on."""

    start: int
    numel: int
    path: Path
    begin: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on the disk: its elements, in memory order `order`, are stored in `chunks`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: MemoryOrder
    chunks: tuple[Chunk, ...]

    def part(self, order: MemoryOrder, start: int, stop: int) -> torch.Tensor:
        """Reads elements [start, stop), counted in `order`: (stop - start,) on the CPU.

        If the file has another order, the whole tensor is briefly in memory.
        """
        if order.agrees(self.order):
            return self._read(start, stop)
        whole = self.order.view(self._read(0, prod(self.shape)))
        return order.flatten(whole)[start:stop]

    def _read(self, start: int, stop: int) -> torch.Tensor:
        values = torch.empty(stop - start, dtype=self.dtype)
        for chunk in self.chunks:
            first, last = max(start, chunk.start), min(stop, chunk.start + chunk.numel)
            if first < last:
                with chunk.path.open("rb") as file:
                    file.seek(chunk.begin + (first - chunk.start) * self.dtype.itemsize)
                    place = buffer_of(values[first - start : last - start])
                    if file.readinto(place) != len(place):
                        raise ValueError(f"{chunk.path}: it has become shorter")
        return values


@dataclass(frozen=True)
class WeightFiles:
    """`tensors` by name; `user_state`: a checkpoint's user state."""

    path: Path
    tensors: dict[str, StoredTensor]
    user_state: dict[str, Any] = field(default_factory=dict)


def find_weights(path: Path, share: slice) -> WeightFiles:
    """Finds the weights at `path`. `share`: the files of a checkpoint whose SHA-256 this rank checks."""
    if path.is_dir():
        if (path / INDEX).exists():
            return _checkpoint(path, share)
        path = _in_folder(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file or folder; {READ}")
    if path.suffix in PICKLED:
        raise ValueError(
            f"{path}: a {path.suffix} file is a pickle, which can run code and is not opened; {READ}: write it with"
            " safetensors.torch.save_file, or give torch.load(..., weights_only=True) to engine.module.load_state_dict"
        )
    if path.suffix == ".json":
        return WeightFiles(path, dict(_indexed(path)))
    return WeightFiles(path, dict(_safetensors(path)))


def _in_folder(folder: Path) -> Path:
    for name in ("model.safetensors.index.json", "model.safetensors"):
        if (folder / name).is_file():
            return folder / name
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"{folder}: it has {len(found)} of {pattern}, {found[0].name} and others; name one")
    raise ValueError(f"{folder}: there are no weights in it; {READ}")


def _indexed(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        names = json.loads(path.read_bytes())["weight_map"]
        files = set(names.values())
    except OSError as error:  # in the midst of reading, which names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        words = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: it is not an index of safetensors files ({words!s:.80})") from None
    tensors: dict[Any, dict[str, StoredTensor]] = {}
    for name in files:
        if not isinstance(name, str) or Path(name).name != name or not (path.parent / name).is_file():
            raise ValueError(f"{path}: it names {name!r:.80}, which is not a file of its folder")
        tensors[name] = dict(_safetensors(path.parent / name))
    for name, file in names.items():
        if name not in tensors[file]:
            raise ValueError(f"{path}: it says that {name} is in {file}, which does not have it")
        yield name, tensors[file][name]


def _safetensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MOST_HEADER, size - 8):
            raise ValueError(f"{path}: it is not a safetensors file, or a part of one; {READ}")
        try:
            entries = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise ValueError(f"{path}: it is not a safetensors file: its header is not JSON; {READ}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: it is not a safetensors file: its header is not a mapping; {READ}")
    for name, entry in entries.items():
        if name != "__metadata__":
            yield name, _tensor(path, name, entry, 8 + length, size)


def _tensor(path: Path, name: str, entry: Any, head: int, size: int) -> StoredTensor:
    """Parses an entry of the header. Raises ValueError if its bytes do not fit its shape, or the file."""
    try:
        dtype, shape, (begin, end) = KNOWN[entry["dtype"]], entry["shape"], entry["data_offsets"]
        right = isinstance(shape, list) and all(type(one) is int and one >= 0 for one in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        right = False
    if not right or end - begin != prod(shape) * dtype.itemsize or head + end > size:
        raise ValueError(f"{path}: it is damaged: its entry of {name} is {entry!r:.120}, in {size} bytes")
    order = MemoryOrder.from_dims(shape, range(len(shape)))
    return StoredTensor(tuple(shape), dtype, order, (Chunk(0, prod(shape), path, head + begin),))


def _checkpoint(folder: Path, share: slice) -> WeightFiles:
    metadata = read_index(folder)
    check_files(folder, metadata, share)
    facts, places = metadata.planner_data, metadata.storage_data
    tensors, saved = {}, metadata.state_dict_metadata
    for key in saved:
        one: Any = saved[key]
        kind, _, name = key.partition(".")
        if kind not in ("master", "frozen", "buffer"):
            continue
        about = facts["buffers" if kind == "buffer" else "parameters"][name]
        shape = tuple(about["shape"])
        if "order" in about and not is_order(about["order"], len(shape)):
            raise ValueError(
                f"{folder}: the order of {name} is {about['order']!r:.60}, which is none of its dimensions"
            )
        order = MemoryOrder.from_dims(shape, range(len(shape))) if kind == "buffer" else saved_order(facts, name)
        chunks = []
        for box in one.chunks:
            place = places[MetadataIndex(key, box.offsets)]
            chunks.append(Chunk(box.offsets[0], box.sizes[0], folder / place.file.name, place.offset))
        tensors[name] = StoredTensor(shape, one.properties.dtype, order, tuple(chunks))
    for name, about in (facts["parameters"] | facts["buffers"]).items():
        if name not in tensors and prod(about["shape"]) == 0:
            order = MemoryOrder.from_dims(about["shape"], range(len(about["shape"])))
            tensors[name] = StoredTensor(tuple(about["shape"]), DTYPES[about["dtype"]], order, ())
    return WeightFiles(folder, tensors, facts["user"])


class Keys(NamedTuple):
    """Names that the file lacks and names that the module lacks, as `module.load_state_dict` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_weights(engine: ShardedEngine, path: str | os.PathLike[str], strict: bool) -> tuple[Keys, dict[str, Any]]:
    """Loads weights, as `Strategy.load_weights` specifies; returns a checkpoint's user state too."""
    engine.settle()
    ranks, found = ranks_of(engine), Path(path).absolute()
    files = ranks.agree(lambda: find_weights(found, slice(ranks.rank, None, ranks.size)))
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
        if isinstance(tensor, torch.Tensor):  # such files hold no extra state of modules
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
        if stored.shape != tuple(tensor.shape):
            raise ValueError(f"{files.path}: {name} has shape {list(stored.shape)} there, {list(tensor.shape)} here")
        if stored.dtype != tensor.dtype and not (_is_plain_float(stored.dtype) and _is_plain_float(tensor.dtype)):
            raise ValueError(f"{files.path}: {name} has dtype {stored.dtype} there, {tensor.dtype} here")
    keys = Keys(missing, [name for name in files.tensors if name not in state])
    for found, words in zip(keys, ("lacks {}, which the module has", "has {}, which the module lacks"), strict=True):
        if strict and found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise ValueError(f"{files.path}: it {words.format(found[0] + more)}; strict=False loads what both have")
    return keys, chosen


def _read(engine: ShardedEngine, chosen: dict[torch.Tensor, StoredTensor]) -> None:
    for whole, order, start, place in _places(engine):
        if whole in chosen and place.numel():
            place.copy_(chosen[whole].part(order, start, start + place.numel()))
    for buffer in engine.module.buffers():
        if buffer in chosen and buffer.numel():
            row_major = MemoryOrder.from_dims(buffer.shape, range(buffer.dim()))
            put(buffer, chosen[buffer].part(row_major, 0, buffer.numel()).view(buffer.shape))


def _places(engine: ShardedEngine) -> Iterator[tuple[nn.Parameter, MemoryOrder, int, torch.Tensor]]:
    """Yields (parameter, its memory order, first element, destination) for this rank's parts of all parameters."""
    for segment in engine.segments:
        parameter = engine.trainable[segment.segment.parameter]
        yield parameter, engine.orders[parameter], segment.segment.start, flat_of(segment.tensor)
    for _, parameter, start, chunk in sharded_frozen(engine):
        yield parameter, engine.orders[parameter], start, chunk
    for parameter in whole_frozen(engine).values():
        yield parameter, engine.orders[parameter], 0, engine.orders[parameter].flatten(parameter)


def _is_plain_float(dtype: torch.dtype) -> bool:
    return dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
