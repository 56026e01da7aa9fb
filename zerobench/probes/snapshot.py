"""Snapshots for torch's viewer (https://pytorch.org/memory_viz): `snapshots/rankR.pickle` in the run's folder.

On a CPU a snapshot is the ledger's step with the highest peak (probes/memory_viz.py). On CUDA it is the allocator's
own: its segments and blocks and, where a history was recorded, every allocation since with its stack and with our
labels (probes/labeled_cuda_snapshot.py).

They are never read here. torch's functions for CUDA are private; only this module uses them.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .history import ENTRIES, History
from .labeled_cuda_snapshot import stamp
from .memory_viz import snapshot_of

FOLDER = "snapshots"

PROTOCOL = 4
"""Of pickles: the newest that the page reads."""


@contextmanager
def snapshots(folder: Path, rank: int, device: torch.device, asked: bool) -> Iterator[History | None]:
    """Writes a snapshot at the end of the context, if one is `asked` for, and when CUDA runs out of memory in any case.

    Yields what the ledger is to fill, or None where nothing is asked for. The error is passed on; a snapshot that could
    not be written is noted on it. A rank on a machine without access to the run's `folder` writes none.
    """
    cuda = device.type == "cuda"
    if not folder.is_dir() or not (asked or cuda):
        yield None
        return
    history = History() if asked else None
    with recorded(device, history):
        try:
            yield history
            if asked:
                write(folder, rank, take(device, history))
        except torch.OutOfMemoryError as error:
            try:
                if cuda:
                    write(folder, rank, take(device, history))
            except Exception as failure:  # of any kind: the run must end with its own error
                error.add_note(f"no snapshot of the allocator could be written: {failure}")
            raise


@contextmanager
def recorded(device: torch.device, history: History | None) -> Iterator[None]:
    """Has CUDA's allocator record its history while the context lasts, where a `history` is kept."""
    if device.type != "cuda" or history is None:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def take(device: torch.device, history: History | None) -> dict[str, Any] | None:
    """Returns the snapshot as it is now; None where no step was measured."""
    if device.type != "cuda":
        return snapshot_of(history.step) if history is not None and history.step is not None else None
    taken: dict[str, Any] = torch.cuda.memory._snapshot()
    if history is not None:
        stamp(taken, history.births, (time.time() - time.perf_counter()) * 1e6)
    return taken


def write(folder: Path | None, rank: int, taken: dict[str, Any] | None) -> None:
    """Writes a snapshot into a run's folder, if there are both and this machine has access; the file gets its name once
    it is complete.
    """
    if taken is None or folder is None or not folder.is_dir():
        return
    target = folder / FOLDER / f"rank{rank}.pickle"
    target.parent.mkdir(exist_ok=True)
    aside = target.with_name(f".{target.name}")
    with aside.open("wb") as file:
        pickle.dump(taken, file, protocol=PROTOCOL)
    aside.replace(target)


def written(folder: Path) -> list[str]:
    """Returns the snapshots in a run's folder, by their relative paths."""
    return sorted(f"{FOLDER}/{path.name}" for path in (folder / FOLDER).glob("rank*.pickle"))
