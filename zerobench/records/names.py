"""The version of all tables, and the names used in columns and rows."""

from __future__ import annotations

SCHEMA_VERSION = 10

STATES = ("parameters", "gradients", "master", "optimizer", "communication")
"""Categories of the model states, including buffers in flight; the formulas predict their sum."""

CATEGORIES = (*STATES, "activations", "inputs", "temporary")
"""The ledger's categories: the parts of a total."""

ALLOCATOR = ("allocated", "reserved", "outside_ledger", "fragmentation", "pinned", "device_used")
"""The allocator's figures for a phase, next to the ledger's categories in the memory table and in no total; on a CPU
only the first and outside_ledger.
"""

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "other")
"""Parts of the volume: logical collectives if the engine names them, else physical ones."""

BETWEEN = "between"
"""The instants at which measured steps end; storages alive then live between steps."""

PHASES = ("init", "data", "forward", "backward", "update", "save", BETWEEN, "step")
"""Phases in order: init before the first step, then the phases of a step, its end, and the step as a whole."""

BETWEEN_STEPS = tuple(f"between_steps_{category}_bytes" for category in CATEGORIES)
"""Columns of runs for bytes that live between steps."""

PHASE_PEAKS = tuple(f"{phase}_peak_bytes" for phase in ("forward", "backward", "update"))
"""Columns of runs for the peak of each phase."""

TIERS = ("device", "host", "nvme")
"""Where bytes are stored. Figures are for the device unless a tier is named."""

LINKS = ("down", "up", "read", "write")
"""Kinds of traffic between tiers: from the device to host memory and back, and from and to files."""

DATA_AXIS, TENSOR_AXIS = "data", "tensor"
"""Axes of the mesh of ranks: ranks that train on different data, and ranks that share one model."""
