"""Tensors in safetensors files: the package safetensors maps files into memory, and files are written here.

[Note: why files are written here]
The package's `save_file` needs all tensors at once, and holds a CPU copy of each GPU tensor until the file is complete.
Here the head is written from shapes alone, then one tensor at a time is copied to the CPU, so a save needs no host
memory for a whole shard, and an export none for a whole model.

    8 bytes   little-endian: the length of the header
    header    JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}, padded with spaces
    data      the tensors' bytes, row-major, end to end in the order of their offsets, which count from here

A file contains no code, so files of any origin can be opened. Wider elements come first, so that all are aligned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..layout import MemoryOrder

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""dtype -> its name in the format."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}
"""torch's name of a dtype, as used in a checkpoint's facts -> dtype."""
FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
"""Dtypes that a load converts into each other."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on the disk, in memory order `order`: 1-D chunks end to end, each with its first element's number."""

    order: MemoryOrder
    dtype: torch.dtype
    chunks: tuple[tuple[int, torch.Tensor], ...]

    def part(self, order: MemoryOrder, start: int, stop: int) -> torch.Tensor:
        """Returns elements [start, stop), counted in `order`: (stop - start,) on the CPU; may be a part of the file.

        If the file has another order, the whole tensor is briefly in memory.
        """
        if not order.agrees(self.order):
            whole = self.order.view(self.part(self.order, 0, prod(self.order.shape)))
            return order.flatten(whole)[start:stop]
        pieces = [
            chunk[max(start - first, 0) : stop - first]
            for first, chunk in self.chunks
            if first < stop and start < first + chunk.numel()
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def row_major(shape: Iterable[int]) -> MemoryOrder:
    """Returns the order of a contiguous tensor."""
    sizes = tuple(shape)
    return MemoryOrder.from_dims(sizes, range(len(sizes)))


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file by name. Raises ValueError for a damaged file, or one of another format.

    They are mapped into memory: the disk is read where elements are used, and the mapping ends with the last tensor.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    except SafetensorError as error:
        raise ValueError(f"{path}: it is not a safetensors file, or a damaged one ({error!s:.120})") from None


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
    array: Any = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def sync(paths: Iterable[Path]) -> None:
    """Waits until these files or folders are on the disk, not only in the page cache (fsync)."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
