"""Fake worlds: the code of a run over tensors that have shapes, dtypes and storages, and no values and no memory."""

from .world import RealWorld, world_of_tensors

__all__ = ["RealWorld", "world_of_tensors"]
