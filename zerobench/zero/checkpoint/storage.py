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

[Note: why the package is not used]
It maps a file into memory, so that a file larger than RAM and swap cannot be opened, and one that is cut short ends the
process by SIGBUS, without an error on the other ranks; and it writes only tensors that are all on the CPU at once.

[Note: a safetensors file]
    8 bytes   little-endian: the length of the header
    header    JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}, padded with spaces
    data      the tensors' bytes, row-major, end to end in the order of their offsets, which count from here

A file contains no code, so files of any origin can be opened. Wider elements come first, so that all are aligned.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from glob import escape
from io import BufferedReader
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from ..layout import MemoryOrder
from ..offload.disk import hold, is_held

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
"""dtype -> its name in the format."""

KNOWN = {name: dtype for dtype, name in NAMES.items()}
"""The format's name of a dtype -> dtype."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}
"""torch's name of a dtype, as used in a checkpoint's facts -> dtype."""

FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
"""Dtypes that a load converts into each other."""

MOST_HEADER = 10**8
"""Largest header in bytes that the format allows."""

MOST_USER_BYTES, MOST_ENTRY_BYTES = 2**25, 2**12
"""Largest size of the user's values in an index, and of the entries for each of its tensors."""


class StoredChunk(NamedTuple):
    """Elements [start, start + numel) of a tensor, stored from byte `begin` of the file `path` on."""

    start: int
    numel: int
    path: Path
    begin: int


class StoredTensor(NamedTuple):
    """A tensor on the disk: its elements, in memory order `order`, are stored in `chunks`."""

    order: MemoryOrder
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    def part(self, order: MemoryOrder, start: int, stop: int) -> torch.Tensor:
        """Returns elements [start, stop) in `order`, (stop - start,); reads the whole tensor if the orders differ."""
        if not order.agrees(self.order):
            whole = self.order.view(self.part(self.order, 0, prod(self.order.shape)))
            return order.flatten(whole)[start:stop]
        values = torch.empty(stop - start, dtype=self.dtype)
        for chunk in self.chunks:
            first, last = max(start, chunk.start), min(stop, chunk.start + chunk.numel)
            if first < last:
                with _opened(chunk.path) as file:
                    file.seek(chunk.begin + (first - chunk.start) * self.dtype.itemsize)
                    buffer = as_bytes(values[first - start : last - start])
                    if file.readinto(buffer) != len(buffer):
                        raise ValueError(f"{chunk.path}: it has become shorter")
        return values


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """Opens a file to read it. Errors name the file, which the system's own errors during a read do not."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def without_collector() -> Iterator[None]:
    """Suspends the garbage collector: over headers of many tensors, which have no cycles, it takes most of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@lru_cache  # the tensors of a file have few shapes
def row_major(*shape: int) -> MemoryOrder:
    """Returns the order of a contiguous tensor."""
    return MemoryOrder.from_dims(shape, range(len(shape)))


def read_index(path: Path, tensors: int, what: str) -> Any:
    """Returns the JSON of an index file, `what` in messages, for a model of so many tensors. Raises ValueError for a
    damaged one, and, before it is read, for one that is larger than it can be: a sparse file may have any size.
    """
    most = 2 * MOST_USER_BYTES + MOST_ENTRY_BYTES * tensors
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(
                f"{path}: it has {size:,} bytes; for a model of {tensors} tensors at most {most:,} are read"
            )
        text = file.read(most)
    try:
        return _parsed(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: it is not {what}, or a damaged one ({error!s:.120})") from None


def _parsed(text: bytes) -> Any:
    """Parses JSON. Raises ValueError for a key that an object has twice: readers would differ in their choice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"it has {next(name for name in entries if names.count(name) > 1)!r:.80} twice")
        return entries

    return json.loads(text, object_pairs_hook=unique)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file, by name. Raises ValueError for a damaged file, or one of another format."""
    size = path.stat().st_size
    with _opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MOST_HEADER, size - 8):
            raise ValueError(f"{path}: it is not a safetensors file, or a part of one")
        try:
            entries = _parsed(file.read(length))
        except (ValueError, RecursionError) as error:
            is_json = not isinstance(error, json.JSONDecodeError | RecursionError)
            why = f"is damaged: {error}" if is_json else "is not JSON"
            raise ValueError(f"{path}: it is not a safetensors file: its header {why}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: it is not a safetensors file: its header is not a mapping")
    entries.pop("__metadata__", None)
    tensors = {name: _stored_tensor(path, name, entry, 8 + length, size) for name, entry in entries.items()}
    ranges = []
    for name, tensor in tensors.items():
        (chunk,) = tensor.chunks
        if chunk.numel:
            ranges.append((chunk.begin, chunk.begin + chunk.numel * tensor.dtype.itemsize, name))
    ranges.sort()
    for (_, end, name), (begin, _, other) in pairwise(ranges):
        if begin < end:
            raise ValueError(f"{path}: it is damaged: {name:.80} and {other:.80} overlap")
    return tensors


def _stored_tensor(path: Path, name: str, entry: Any, head: int, size: int) -> StoredTensor:
    """Parses an entry of the header. Raises ValueError if its bytes do not fit its shape, or the file."""
    try:
        dtype, shape, (begin, end) = KNOWN[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        right = isinstance(shape, list) and {*map(type, numbers)} == {int} and min(numbers) >= 0
    except (KeyError, TypeError, ValueError):
        right = False
    if not right or end - begin != (numel := prod(shape)) * dtype.itemsize or head + end > size:
        raise ValueError(f"{path}: it is damaged: its entry of {name} is {entry!r:.120}, in {size} bytes")
    return StoredTensor(row_major(*shape), dtype, (StoredChunk(0, numel, path, head + begin),))


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Returns the head of a file for `tensors` (length and header), and each tensor's byte offset in the file. Only
    shapes and dtypes are read; the offsets are in the file's order. Raises ValueError for a dtype that the format
    lacks.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if tensor.dtype not in NAMES:
            raise ValueError(f"{name}: its dtype is {tensor.dtype}, which safetensors does not know")
        begins[name], end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [begins[name], end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the data is aligned for every dtype
    head = len(header).to_bytes(8, "little") + header
    return head, {name: len(head) + begin for name, begin in begins.items()}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns a row-major copy of the elements as bytes; torch refuses to resize a storage that numpy has seen."""
    return as_bytes(tensor.detach().to("cpu", copy=True).contiguous())


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor as a writable buffer, without a copy."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def sync(paths: Iterable[Path]) -> None:
    """Waits until these files or folders are on the disk, not only in the page cache (fsync)."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -- the folder of a checkpoint ------------------------------------------------------------------------------------


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
        if own and not is_held(_lock_path(stale)):
            shutil.rmtree(stale, ignore_errors=True)
    for lock in path.parent.glob(f".{escape(path.name)}.partial-{NUMBER}.lock"):
        if not is_held(lock):
            lock.unlink(missing_ok=True)
    number = uuid4().hex[:8]  # per save, so that new files never overwrite those of the checkpoint in place
    partial = path.parent / f"{path.name}.partial-{number}"
    partial.parent.mkdir(parents=True, exist_ok=True)
    held.callback(_lock_path(partial).unlink, missing_ok=True)
    held.callback(os.close, hold(_lock_path(partial)))
    partial.mkdir()
    return str(partial)


def _lock_path(partial: Path) -> Path:
    """Returns the lock of a save in progress, next to its folder: created before the folder, removed after it."""
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
    if not (path / INDEX).exists():
        os.rename(partial, path)
        sync([path.parent])
        return
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
    sync([path.parent])


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk: its files, facts, and flat tensors by name (contents.py)."""

    path: Path
    files: tuple[str, ...]
    facts: dict[str, Any]
    tensors: dict[str, StoredTensor]


@without_collector()
def read_checkpoint(path: Path, tensors: int) -> Checkpoint:
    """Reads index and headers, for a model of so many tensors. Raises ValueError for none, or a damaged one."""
    index = path / INDEX
    if not index.is_file():
        raise ValueError(f"{path}: it is not a checkpoint: it has no {INDEX}")
    _check_is_inside(path, INDEX)
    whole = read_index(index, tensors, "the index of a checkpoint")
    with wanting_facts(path):
        if whole["format"] != FORMAT or whole["version"] is not VERSION:
            raise ValueError(
                f"{index}: its format is {whole['format']!r:.60} of version {whole['version']!r:.60}, and this"
                f" zerobench reads {FORMAT!r} of version {VERSION}"
            )
        if not isinstance(whole["facts"]["user"], dict):
            raise TypeError(f"its user state is a {type(whole['facts']['user']).__name__}")
        stored = _checked_tensors(path, whole["facts"], whole["files"])
        return Checkpoint(path, tuple(whole["files"]), whole["facts"], stored)


@contextmanager
def wanting_facts(path: Path) -> Iterator[None]:
    """Raises ValueError if facts are missing or of another type: any program may have written them."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path / INDEX}: it is not the index of a checkpoint, or a damaged one ({error!r:.80})"
        ) from None


def _checked_tensors(path: Path, facts: Mapping[str, Any], files: Mapping[str, Any]) -> dict[str, StoredTensor]:
    described = _described_flats(facts)
    chunks: dict[str, list[tuple[StoredChunk, torch.dtype]]] = {}
    for file, size in files.items():
        if Path(file).name != file:
            raise ValueError(f"{path / INDEX}: it names {file!r:.80}, which is not a file of its folder")
        if not (path / file).is_file():
            raise ValueError(f"{path / file}: it is missing")
        _check_is_inside(path, file)
        if (present := (path / file).stat().st_size) != size:
            raise ValueError(f"{path / file}: it has {present} bytes, but the index says {size}")
        for full_name, stored in read_header(path / file).items():
            parts = CHUNK.fullmatch(full_name)
            if parts is None or parts[1] not in described:
                raise ValueError(f"{path / file}: it has {full_name!r:.60}, which the index does not describe")
            (chunk,) = stored.chunks
            chunks.setdefault(parts[1], []).append((chunk._replace(start=int(parts[2])), stored.dtype))
    tensors = {}
    for name, (order, dtype) in described.items():
        own, end = sorted(chunks.get(name, ()), key=lambda stored: stored[0].start), 0
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


def _check_is_inside(folder: Path, name: str) -> None:
    """Raises ValueError for a symbolic link to a file outside of the folder."""
    if (folder / name).resolve().parent != folder.resolve():
        raise ValueError(f"{folder / name}: it is a link to {(folder / name).resolve()}, outside of the checkpoint")


def _described_flats(facts: Mapping[str, Any]) -> dict[str, tuple[MemoryOrder, torch.dtype]]:
    """Returns the flat tensors that the facts allow: their order, and the dtype of their owner."""
    flats = {}
    for name, entry in facts["buffers"].items():
        flats[f"buffer.{name}"] = row_major(*entry["shape"]), DTYPES[entry["dtype"]]
    for name, entry in facts["parameters"].items():
        order, dtype = saved_order(facts, name), DTYPES[entry["dtype"]]
        kinds = ("master", "pending") if entry["trainable"] else ("frozen",)
        flats |= {f"{kind}.{name}": (order, dtype) for kind in kinds}
        for key, state in facts["optimizer"]["states"].get(name, {}).items():
            if is_elements(state):
                blocks = row_major(-(-prod(order.shape) // state.get("block", 1)))
                flats[f"optimizer.{name}.{key}"] = blocks if is_blocks(state) else order, DTYPES[state["elements"]]
    return flats


def saved_order(facts: Mapping[str, Any], name: str) -> MemoryOrder:
    """Returns the memory order of a parameter's flat tensors in a checkpoint with these facts."""
    shape = facts["parameters"][name]["shape"]
    dims = facts["parameters"][name].get("order")
    if dims is None:
        return row_major(*shape)
    if sorted(dims) != list(range(len(shape))):
        raise ValueError(f"{name}: its order is {dims!r:.60} in the checkpoint, which is none of its dimensions")
    return MemoryOrder.from_dims(shape, dims)


def is_elements(value: Any) -> bool:
    """Returns True if a state in the facts denotes a tensor of elements, per parameter element or per block."""
    return isinstance(value, dict) and "elements" in value


def is_blocks(value: Any) -> bool:
    """Returns True if the state has one element for each "block" of the parameter's elements."""
    return is_elements(value) and "block" in value
