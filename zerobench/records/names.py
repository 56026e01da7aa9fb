"""The version of all tables, and the names that columns and rows are made of."""

from __future__ import annotations

SCHEMA_VERSION = 9

STATES = ("parameters", "gradients", "master", "optimizer", "communication")
"""Categories that make up the model states and what is in flight; the formulas bind their sum."""

CATEGORIES = (*STATES, "activations", "inputs", "temporary")
"""The ledger's categories: the parts of a total."""

ALLOCATOR = ("allocated", "reserved", "outside_ledger", "fragmentation", "pinned", "device_used")
"""Figures of the allocator of a phase, beside the ledger's categories in the memory table and part of no total; of a
CPU's the first and outside_ledger alone."""

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "other")
"""Parts of the volume: logical collectives where the engine names them, physical ones elsewhere."""

BETWEEN = "between"
"""The instants at which measured steps end: what lives then lives between steps."""

PHASES = ("init", "data", "forward", "backward", "update", BETWEEN, "step")
"""Phases in their order: init before the first step, then those of a step, its end, and the step as a whole."""

BETWEEN_STEPS = tuple(f"between_steps_{category}_bytes" for category in CATEGORIES)
"""Columns of runs on what lives between steps."""

PHASE_PEAKS = tuple(f"{phase}_peak_bytes" for phase in ("forward", "backward", "update"))
"""Columns of runs on the peak of each phase."""

TIERS = ("device", "host", "nvme")
"""Where bytes lie. A table's figures are the device's where none is named."""

LINKS = ("down", "up", "read", "write")
"""Kinds of traffic between tiers: from the device to host memory and back, from files and to them."""

DATA_AXIS, TENSOR_AXIS = "data", "tensor"
"""Axes of the mesh of ranks: of those that train on different data, and of those that share one model."""
