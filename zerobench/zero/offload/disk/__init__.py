"""File tier: bounded host memory (buffer_pool.py), tensors in files (file_store.py), folders for them (scratch.py)."""

from .buffer_pool import Buffer, Pool
from .direct_io import ALIGN_BYTES, DiskError
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
