"""Simulates a GPU with fake CPU tensors: each module covers one difference between the two."""

from .device_memory import BLAS_WORKSPACE, DEFAULT, EXPANDABLE, SETTINGS, Allocations, DeviceMemory
from .stand_in import ATTENTION_KERNELS, as_gpu

__all__ = [
    "ATTENTION_KERNELS", "BLAS_WORKSPACE", "DEFAULT", "EXPANDABLE", "SETTINGS", "Allocations", "DeviceMemory", "as_gpu",
]  # fmt: skip
