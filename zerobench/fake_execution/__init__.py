"""Simulates cells on fake tensors in this process: no ranks, no weights, no memory, no results folder."""

from .execute import CPU, CUDA, LIMITS, Execution, Limits, Target, execute, execute_all

__all__ = ["CPU", "CUDA", "LIMITS", "Execution", "Limits", "Target", "execute", "execute_all"]
