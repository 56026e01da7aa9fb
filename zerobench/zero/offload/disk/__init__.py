"""File tier: bounded host memory (direct_io.py), tensors in files (file_store.py), folders for them (scratch.py)."""

from .direct_io import ALIGN_BYTES, Buffer, DiskError, Pool
from .file_store import FileStore, Region
from .io_threads import IoHandle
from .scratch import Scratch, problems_of_path, sweep

__all__ = [
    "ALIGN_BYTES",
    "Buffer",
    "DiskError",
    "FileStore",
    "IoHandle",
    "Pool",
    "Region",
    "Scratch",
    "problems_of_path",
    "sweep",
]
