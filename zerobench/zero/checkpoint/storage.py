"""The files of a checkpoint: a folder of safetensors files, which any program can open, and an index of facts.

[Note: the folder of a checkpoint]
    checkpoint.json             {"format": "zerobench checkpoint", "version": 4, "facts": {...}, "files": {name: bytes}}
    rank0-1f2e3d4c.safetensors  the chunks that rank 0 saved, `master.0.weight[35:]`: a flat tensor (contents.py), and
                                the chunk's first element; the number in the name identifies the save
    rank1-1f2e3d4c.safetensors  ...

Nothing in the folder is code, and nothing is unpickled. torch.distributed.checkpoint is not used: it sends plans and
results as pickles, and its reader unpickles the metadata. Every tensor is flat, so that loading at another N reads
ranges of elements. What is read is checked first: any program may have written it.

[Note: all or nothing]
A save becomes visible at one rename:

    1. write     every rank writes into `<folder>.partial-<number>`, next to the folder, and waits for the disk (fsync)
    2. finish    once all have written, rank 0 writes the index there
    3. rename    a new checkpoint: the partial folder is renamed. An existing one: the new files are moved next to the
                 old ones, then the rename of the index replaces the checkpoint, and the old files are deleted

So the last good checkpoint is always complete, and the next save deletes the remains of an interrupted one, unless
another process, or perhaps another machine, is still writing them (`.<folder>.partial-<number>.lock`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from math import prod
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from ..offload.disk.scratch import hold, is_held
from .facts import flats_of
from .safetensors import StoredChunk, StoredTensor, bytes_of, layout, read_header, read_index, sync, without_collector

INDEX = "checkpoint.json"
FORMAT, VERSION = "zerobench checkpoint", 4

NUMBER = "[0-9a-f]" * 8
"""Pattern of a save's number. Files and folders of other names are a user's, and stay."""

OWN = f"rank[0-9]*-{NUMBER}.safetensors"
"""Pattern of a rank's file."""

CHUNK = re.compile(r"(.+)\[(\d{1,18}):\]")
"""Pattern of a chunk's name in its file: a rank may hold several chunks of one tensor."""

Chunks = dict[str, dict[int, torch.Tensor]]
"""This rank's part of the state: flat tensor (contents.py) -> first element -> chunk."""


def begin(path: Path, held: ExitStack) -> str:
    """Makes the partial folder of a save to `path`, and returns it; rank 0 does so. `held`: keeps other saves, also of
    other processes, from removing it as the remains of an interrupted one.
    """
    if not (path / INDEX).exists() and path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path}: the path exists and is not a checkpoint; choose another one")
    for stale in path.parent.glob(f"{escape(path.name)}.partial-{NUMBER}"):
        own = all(file.match(OWN) or file.name == INDEX for file in stale.glob("*"))
        if own and not is_held(_lock_of(stale)):
            shutil.rmtree(stale, ignore_errors=True)
    for lock in path.parent.glob(f".{escape(path.name)}.partial-{NUMBER}.lock"):
        if not is_held(lock):
            lock.unlink(missing_ok=True)
    number = uuid4().hex[:8]  # per save, so that new files never overwrite those of the checkpoint in place
    partial = path.parent / f"{path.name}.partial-{number}"
    partial.parent.mkdir(parents=True, exist_ok=True)
    held.callback(_lock_of(partial).unlink, missing_ok=True)
    held.callback(os.close, hold(_lock_of(partial)))
    partial.mkdir()
    return str(partial)


def _lock_of(partial: Path) -> Path:
    """Returns the lock of a save in progress, next to its folder: there before it, and gone after it."""
    return partial.with_name(f".{partial.name}.lock")


def write(partial: Path, rank: int, flats: Chunks) -> dict[str, int]:
    """Writes a rank's file, if it has chunks, and waits for the disk; returns its name and its size in bytes."""
    tensors = {f"{name}[{start}:]": chunk for name, chunks in flats.items() for start, chunk in chunks.items()}
    if not tensors:
        return {}
    path = partial / f"rank{rank}-{partial.name[-8:]}.safetensors"
    head, begins = layout(tensors)
    with path.open("wb") as file:
        file.write(head)
        for name in begins:
            file.write(bytes_of(tensors[name]))
        size = file.tell()
    sync([path])
    return {path.name: size}


def finish(partial: Path, path: Path, facts: dict[str, Any], files: dict[str, int]) -> None:
    """Writes the index and makes the folder the checkpoint, once all ranks have written."""
    index = {"format": FORMAT, "version": VERSION, "facts": facts, "files": files}
    (partial / INDEX).write_text(json.dumps(index))
    sync([partial / INDEX, partial])
    if (path / INDEX).exists():
        _replace(partial, path)
    else:
        os.rename(partial, path)
    sync([path.parent])


def _replace(partial: Path, path: Path) -> None:
    new = [file.name for file in partial.iterdir() if file.name != INDEX]
    for name in new:
        os.rename(partial / name, path / name)
    sync([path])  # the new files' names are on the disk before the index that refers to them
    os.rename(partial / INDEX, path / INDEX)  # atomic: from here on it is the new checkpoint
    sync([path])
    with suppress(OSError):  # files that cannot be deleted now are deleted by the next save
        partial.rmdir()
        for old in path.glob(OWN):
            if old.name not in new:
                old.unlink()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk: its facts (facts.py) and its flat tensors by name (contents.py).

    `files`: names of its files, which have the save's number
    """

    path: Path
    files: tuple[str, ...]
    facts: dict[str, Any]
    tensors: dict[str, StoredTensor]


@without_collector()
def read_checkpoint(path: Path, tensors: int) -> Checkpoint:
    """Reads the index and the headers of a checkpoint, for a model of so many tensors. Raises ValueError if there is
    none, or if it is damaged.
    """
    index = path / INDEX
    if not index.is_file():
        raise ValueError(f"{path}: it is not a checkpoint: it has no {INDEX}")
    _check_within(path, INDEX)
    whole = read_index(index, tensors, "the index of a checkpoint")
    with wanting_facts(path):
        if whole["format"] != FORMAT or whole["version"] is not VERSION:
            words = f"{whole['format']!r:.60} of version {whole['version']!r:.60}"
            raise ValueError(
                f"{index}: its format is {words}, and this zerobench reads {FORMAT!r} of version {VERSION}"
            )
        if not isinstance(whole["facts"]["user"], dict):
            raise TypeError(f"its user state is a {type(whole['facts']['user']).__name__}")
        stored = _tensors(path, whole["facts"], whole["files"])
        return Checkpoint(path, tuple(whole["files"]), whole["facts"], stored)


@contextmanager
def wanting_facts(path: Path) -> Iterator[None]:
    """Raises ValueError if the facts that are used inside are missing or of another type: any program may have
    written them.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        words = f"it is not the index of a checkpoint, or a damaged one ({error!r:.80})"
        raise ValueError(f"{path / INDEX}: {words}") from None


def _tensors(path: Path, facts: Mapping[str, Any], files: Mapping[str, Any]) -> dict[str, StoredTensor]:
    known = flats_of(facts)
    chunks: dict[str, list[tuple[StoredChunk, torch.dtype]]] = {}
    for file, size in files.items():
        if Path(file).name != file:
            raise ValueError(f"{path / INDEX}: it names {file!r:.80}, which is not a file of its folder")
        if not (path / file).is_file():
            raise ValueError(f"{path / file}: it is missing")
        _check_within(path, file)
        if (there := (path / file).stat().st_size) != size:
            raise ValueError(f"{path / file}: it has {there} bytes, but the index says {size}")
        for full_name, stored in read_header(path / file).items():
            parts = CHUNK.fullmatch(full_name)
            if parts is None or parts[1] not in known:
                raise ValueError(f"{path / file}: it has {full_name!r:.60}, which the index does not describe")
            (chunk,) = stored.chunks
            chunks.setdefault(parts[1], []).append((chunk._replace(start=int(parts[2])), stored.dtype))
    tensors = {}
    for name, (order, dtype) in known.items():
        own, end = sorted(chunks.get(name, ()), key=lambda one: one[0].start), 0
        for chunk, _ in own:
            if chunk.start != end:
                raise ValueError(f"{path}: the chunks of {name} overlap or leave a gap at element {end}")
            end += chunk.numel
        if not own and name.startswith("pending."):
            continue
        kinds = {kind for _, kind in own} or {dtype}  # a tensor without elements is in no file
        if end != prod(order.shape) or len(kinds) > 1:
            raise ValueError(f"{path}: the chunks of {name} end at element {end} of {prod(order.shape)}, in {kinds}")
        tensors[name] = StoredTensor(order, kinds.pop(), tuple(chunk for chunk, _ in own))
    return tensors


def _check_within(folder: Path, name: str) -> None:
    """Raises ValueError for a symbolic link to a file outside of the folder."""
    if (folder / name).resolve().parent != folder.resolve():
        raise ValueError(f"{folder / name}: it is a link to {(folder / name).resolve()}, outside of the checkpoint")
