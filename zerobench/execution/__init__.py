"""Executes cells on fake tensors in this process: no ranks, no weights, no memory, no results folder."""

from .execute import Execution, execute

__all__ = ["Execution", "execute"]
