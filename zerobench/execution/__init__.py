"""Executes cells on fake tensors in this process: no ranks, no weights, no memory, no results folder."""

from .execute import Execution, execute
from .target import CPU, CUDA, Target

__all__ = ["CPU", "CUDA", "Execution", "Target", "execute"]
