"""Snapshots of CUDA's allocator for torch's viewer (https://pytorch.org/memory_viz): its segments and blocks and, where
a history was recorded, every allocation since with its stack.

They are written to `snapshots/rankR.pickle` in the run's folder, and never read here. torch's functions for them are
private; they are named here alone.
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
    """Writes a snapshot when what is within ends, if a `history` is asked for, and when it runs out of CUDA's memory in
    any case. The error goes on; a snapshot that could not be written is noted on it.
    """
    if device.type != "cuda":
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
        except Exception as failure:  # whatever it is, the run is to end with what it ended with
            error.add_note(f"no snapshot of the allocator could be written: {failure}")
        raise
    finally:
        if history:
            torch.cuda.memory._record_memory_history(enabled=None)


def write(folder: Path, rank: int) -> None:
    """The allocator of this process as it is now; the file has its name once it is whole."""
    target = folder / FOLDER / f"rank{rank}.pickle"
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}")
    torch.cuda.memory._dump_snapshot(str(aside))
    aside.replace(target)


def written(folder: Path) -> list[str]:
    """The snapshots in a run's folder, by their paths from there."""
    return sorted(f"{FOLDER}/{path.name}" for path in (folder / FOLDER).glob("rank*.pickle"))
