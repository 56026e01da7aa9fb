"""A GPU, acted on fake tensors of the CPU: each module is one thing that runs otherwise there."""

from .stand_in import ATTENTION_KERNELS, as_gpu

__all__ = ["ATTENTION_KERNELS", "as_gpu"]
