"""The safetensors format, implemented here in a few lines because the engine depends on torch alone.

[Note: a safetensors file]
    8 bytes   little-endian: the length of the header
    header    JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}, padded with spaces
    data      the tensors' bytes, row-major, end to end in the order of their offsets, which count from here

A file contains no code, so files of any origin can be opened. Wider elements come first, so that all are aligned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""dtype -> its name in the format."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}
"""torch's name of a dtype, as used in the index -> dtype."""

_ALIGN = 8


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
    header += b" " * (-len(header) % _ALIGN)
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
