"""A GPU, acted on fake tensors of the CPU: each module is one thing that runs otherwise there."""

from .device_memory import BLAS_WORKSPACE, Allocations, DeviceMemory
from .stand_in import ATTENTION_KERNELS, as_gpu

__all__ = ["ATTENTION_KERNELS", "BLAS_WORKSPACE", "Allocations", "DeviceMemory", "as_gpu"]
