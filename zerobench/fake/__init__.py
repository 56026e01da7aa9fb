"""Fake worlds: run code on tensors that have shapes, dtypes and storages, but no values and no memory."""

from .world import RealWorld, world_of_tensors

__all__ = ["RealWorld", "world_of_tensors"]
