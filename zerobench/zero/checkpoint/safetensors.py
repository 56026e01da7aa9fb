"""Tensors in safetensors files, which are read and written here, without the safetensors package.

[Note: why the package is not used]
Reading: the package maps a file into private, writable memory, so a file larger than RAM and swap cannot be opened, and
a file that is cut short or a failing disk ends the process by SIGBUS, without an error on the other ranks.
Writing: the package's `save_file` needs all tensors at once, on the CPU, while here one tensor at a time is copied from
the GPU, so a save needs no host memory for a whole shard, and an export none for a whole model.

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from io import BufferedReader
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..layout import MemoryOrder

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
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
        """Reads elements [start, stop), counted in `order`: (stop - start,) on the CPU.

        If the file has another order, the whole tensor is briefly in memory.
        """
        if not order.agrees(self.order):
            whole = self.order.view(self.part(self.order, 0, prod(self.order.shape)))
            return order.flatten(whole)[start:stop]
        values = torch.empty(stop - start, dtype=self.dtype)
        for chunk in self.chunks:
            first, last = max(start, chunk.start), min(stop, chunk.start + chunk.numel)
            if first < last:
                with _opened(chunk.path) as file:
                    file.seek(chunk.begin + (first - chunk.start) * self.dtype.itemsize)
                    buffer = buffer_of(values[first - start : last - start])
                    if file.readinto(buffer) != len(buffer):
                        raise ValueError(f"{chunk.path}: it has become shorter")
        return values


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """Opens a file to read it. Errors name the file: in the midst of reading, the system's do not."""
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


def row_major(shape: Iterable[int]) -> MemoryOrder:
    """Returns the order of a contiguous tensor."""
    return _row_major(tuple(shape))


@lru_cache
def _row_major(shape: tuple[int, ...]) -> MemoryOrder:  # the tensors of a file have few shapes
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
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in made if names.count(name) > 1)!r:.80} twice")
    return made


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
            words = (
                "is not JSON" if isinstance(error, json.JSONDecodeError | RecursionError) else f"is damaged: {error}"
            )
            raise ValueError(f"{path}: it is not a safetensors file: its header {words}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: it is not a safetensors file: its header is not a mapping")
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, 8 + length, size) for name, entry in entries.items()}
    _check_apart(path, tensors)
    return tensors


def _check_apart(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises ValueError if two tensors share bytes."""
    ranges = []
    for name, tensor in tensors.items():
        (chunk,) = tensor.chunks
        if chunk.numel:
            ranges.append((chunk.begin, chunk.begin + chunk.numel * tensor.dtype.itemsize, name))
    ranges.sort()
    for (_, end, name), (begin, _, other) in pairwise(ranges):
        if begin < end:
            raise ValueError(f"{path}: it is damaged: {name:.80} and {other:.80} overlap")


def _tensor(path: Path, name: str, entry: Any, head: int, size: int) -> StoredTensor:
    """Parses an entry of the header. Raises ValueError if its bytes do not fit its shape, or the file."""
    try:
        dtype, shape, (begin, end) = KNOWN[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        right = isinstance(shape, list) and {*map(type, numbers)} == {int} and min(numbers) >= 0
    except (KeyError, TypeError, ValueError):
        right = False
    if not right or end - begin != (numel := prod(shape)) * dtype.itemsize or head + end > size:
        raise ValueError(f"{path}: it is damaged: its entry of {name} is {entry!r:.120}, in {size} bytes")
    return StoredTensor(_row_major(tuple(shape)), dtype, (StoredChunk(0, numel, path, head + begin),))


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """Returns the head of a file for `tensors` (length and header), and each tensor's byte offset in the file.

    Only shapes and dtypes are read; the offsets are in the file's order. Raises ValueError for a dtype that the format
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
    return buffer_of(tensor.detach().to("cpu", copy=True).contiguous())


def buffer_of(tensor: torch.Tensor) -> memoryview:
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
