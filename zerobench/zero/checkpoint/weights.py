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

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import labels
from ..engine import ShardedEngine
from .consensus import ranks_of
from .contents import before_load, parts_of, put, tensors_in
from .safetensors import FLOATS, StoredTensor, read_header, read_index, row_major, without_collector
from .storage import INDEX, read_checkpoint

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
