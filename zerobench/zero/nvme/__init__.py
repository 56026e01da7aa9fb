"""The file tier: bounded host memory (pool.py), tensors in files (files.py), folders for them (scratch.py)."""

from .channel import ALIGN_BYTES, DiskError
from .files import FileStore, Region
from .pool import Buffer, Pool
from .requests import Handle
from .scratch import Scratch, problems_of_path, sweep

__all__ = [
    "ALIGN_BYTES",
    "Buffer",
    "DiskError",
    "FileStore",
    "Handle",
    "Pool",
    "Region",
    "Scratch",
    "problems_of_path",
    "sweep",
]
