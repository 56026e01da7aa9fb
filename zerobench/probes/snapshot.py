"""Snapshots of CUDA's allocator for torch's viewer (https://pytorch.org/memory_viz): its segments and blocks and, where
a history was recorded, every allocation since with its stack.

They are written to `snapshots/rankR.pickle` in the run's folder, and never read here. torch's functions for them are
private; only this module uses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

FOLDER = "snapshots"

ENTRIES = 200_000
"""Events of a history that are kept, the last ones; some KB each."""


@contextmanager
def snapshots(folder: Path, rank: int, device: torch.device, history: bool) -> Iterator[None]:
    """Writes a snapshot at the end of the context, if a `history` is requested, and on running out of CUDA memory in
    any case. The error is passed on; a snapshot that could not be written is noted on it. A rank on a machine without
    access to the run's `folder` writes none.
    """
    if device.type != "cuda" or not folder.is_dir():
        yield
        return
    if history:
        torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")
    try:
        yield
        if history:
            write(folder, rank)
    except torch.OutOfMemoryError as error:
        try:
            write(folder, rank)
        except Exception as failure:  # of any kind: the run must end with its own error
            error.add_note(f"no snapshot of the allocator could be written: {failure}")
        raise
    finally:
        if history:
            torch.cuda.memory._record_memory_history(enabled=None)


def write(folder: Path, rank: int) -> None:
    """Writes the allocator of this process as it is now; the file gets its name once it is complete."""
    target = folder / FOLDER / f"rank{rank}.pickle"
    target.parent.mkdir(exist_ok=True)
    aside = target.with_name(f".{target.name}")
    torch.cuda.memory._dump_snapshot(str(aside))
    aside.replace(target)


def written(folder: Path) -> list[str]:
    """Returns the snapshots in a run's folder, by their relative paths."""
    return sorted(f"{FOLDER}/{path.name}" for path in (folder / FOLDER).glob("rank*.pickle"))
