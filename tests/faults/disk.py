"""Ranks with files, for the launcher's tests."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from zerobench.zero.offload.disk import FileStore, Scratch


@contextmanager
def mounted(home: Path, size: str) -> Iterator[Path]:
    """A file system of that size, as mount's option has it; the test is skipped where none may be mounted."""
    home.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", home], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield home
    finally:
        subprocess.run(["umount", "-l", home], check=True)


@contextmanager
def opened(folder: Path, *settings: Any, **named: Any) -> Iterator[FileStore]:
    """A store whose requests are over, and whose file is gone, afterwards."""
    store = FileStore(folder, *settings, **named)
    try:
        yield store
    finally:
        for handle in store._under_way:
            handle.settle()
        store._end()


@dataclass(frozen=True)
class DiskJob:
    """`scratch`: where the launcher sweeps."""

    rank: int
    scratch: str


def is_killed_while_writing(job: DiskJob, tell: Any) -> None:
    """Rank 1 is, when rank 0 has its file, too."""
    folder = Scratch(job.scratch)
    store = FileStore(folder.path)
    region = store.allocate(2**24)
    region.write(torch.zeros(2**24, dtype=torch.uint8))
    Path(job.scratch, f"{job.rank}.pid").write_text(str(os.getpid()))
    while job.rank == 1 and not Path(job.scratch, "0.pid").exists():
        time.sleep(0.01)
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def leaves_files(job: DiskJob, tell: Any) -> list[str]:
    """Neither closes anything nor ends its interpreter."""
    folder = Scratch(job.scratch)
    store = FileStore(folder.path)
    store.allocate(2**20)
    return [str(path) for path in folder.path.iterdir()]
