"""The file tier (zero/offload/disk) without files: regions have their bytes, transfers their sizes, and no byte moves.

channel   counts what is reserved and tells of each transfer, as long as the disk would carry it
carriers  carry every request at once, in the thread that asks: a read is over when it is launched
pool      of a fake tensor, whose address belongs to nothing: no advice is given on its pages
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ..zero import labels
from ..zero.offload import paged_tensor
from ..zero.offload.disk import buffer_pool, file_store
from ..zero.offload.disk.direct_io import aligned
from ..zero.offload.disk.io_threads import Act


class NoFile:
    """Stands for a Channel that is granted what it wants."""

    def __init__(self, path: Path, direct: bool, piece_bytes: int, depth: int) -> None:
        self.path, self.direct, self.bytes = path, direct, 0

    def grow(self, nbytes: int) -> int:
        """Reserves `nbytes` more; returns where they begin."""
        self.bytes += nbytes
        return self.bytes - nbytes

    def read(self, piece: range, offset: int, name: str) -> None:
        """Tells of a read."""
        labels.transfer(labels.READ, self._carried(piece), name)

    def write(self, piece: range, offset: int, name: str) -> None:
        """Tells of a write."""
        labels.transfer(labels.WRITE, self._carried(piece), name)

    def close(self) -> None:
        """Leaves nothing."""

    def _carried(self, piece: range) -> int:
        return aligned(len(piece)) if self.direct else len(piece)


class AtOnce:
    """Stands for Carriers."""

    def __init__(self, count: int, name: str) -> None:
        pass

    def submit(self, block: Hashable, act: Act) -> None:
        """Calls `act`."""
        act()

    def end(self) -> None:
        """Nothing is under way."""


class NoFolder:
    """Stands for a Scratch: `path` is named in messages, and not made."""

    def __init__(self, parent: Path | str) -> None:
        self.path = Path(parent)

    def close(self) -> None:
        """Leaves nothing."""


def _bytes_of(tensor: torch.Tensor) -> range:
    """Stands for a tensor's memory: it has a length, and parts."""
    return range(tensor.numel() * tensor.element_size())


ROWS: list[tuple[Any, str, Any]] = [
    (file_store, "Channel", NoFile),
    (file_store, "Carriers", AtOnce),
    (file_store, "memory_of", _bytes_of),
    (file_store, "checksum", lambda piece: 0),
    (paged_tensor, "Scratch", NoFolder),
    (buffer_pool, "_in_large_pages", lambda address, nbytes: None),
]
"""(module, name, what stands for it)."""


@contextmanager
def no_files() -> Iterator[None]:
    """Counts the bytes of files, and makes none."""
    with ExitStack() as stack:
        for module, name, other in ROWS:
            stack.enter_context(mock.patch.object(module, name, other))
        yield
