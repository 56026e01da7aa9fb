"""The file tier: bounded host memory (pool.py), tensors in files (files.py), folders for them (scratch.py)."""

from .channel import ALIGN_BYTES, DiskError
from .files import FileStore, Region
from .pool import Buffer, Pool
from .requests import Handle

__all__ = ["ALIGN_BYTES", "Buffer", "DiskError", "FileStore", "Handle", "Pool", "Region"]
