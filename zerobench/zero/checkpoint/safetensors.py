"""The safetensors format by hand: it is a few lines, and the engine depends on torch alone.

[Note: a safetensors file]
    8 bytes   little-endian: how long the header is
    header    JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}, padded with spaces
    data      the tensors' bytes, row by row, end to end in the order of their offsets, which count from here

No part of it is code: a file from anywhere can be opened. Wider elements come first, so that all are aligned.
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
"""Each dtype's name in the format."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}
"""The same dtypes by torch's names, which the index uses."""

_ALIGN = 8


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """The head of a file (length and header) that will hold `tensors`, and where in the file each begins, in bytes.

    Only their shapes and dtypes matter; the places are in the order in which the file holds them. Raises
    ValueError for a dtype that the format does not know.
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
    """The tensor's elements, row by row, as bytes. A copy: torch never again resizes a storage that numpy has seen."""
    return buffer_of(tensor.detach().to("cpu", copy=True).contiguous())


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The memory itself of a contiguous tensor on the CPU, as bytes that can be read into."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def sync(paths: Iterable[Path]) -> None:
    """Waits until these files or folders are on the disk, not only in the system's memory."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
