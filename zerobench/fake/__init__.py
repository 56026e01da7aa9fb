"""Fake worlds: run code on tensors that have shapes, dtypes and storages, but no values and no memory.

Probes, models and all above them may import it; it knows the engine alone.
"""

from .substitutes import as_with_values, grouped_products_of_any_dtype
from .world import RealWorld, world_of_tensors

__all__ = ["RealWorld", "as_with_values", "grouped_products_of_any_dtype", "world_of_tensors"]
