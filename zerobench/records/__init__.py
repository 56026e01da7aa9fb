"""Row types of the tables: columns, units, meanings. Bytes are integers, times are in seconds.

Everything may import it; it imports nothing of zerobench.

A *run* is one launch of a cell; `measure.repeats` asks for several. Its folder holds run.json (one RunRow,
run_row.py) and a parquet file for each of the long tables (long_rows.py), whose rows carry the run's
id. describe.py returns units and meanings.
"""

from __future__ import annotations

from .long_rows import CertificateRow, EventRow, LineRow, MemoryRow, StepRow, TensorRow, TimelineRow, TrafficRow
from .run_row import (
    ALLOCATOR,
    BETWEEN,
    BETWEEN_STEPS,
    CATEGORIES,
    COLLECTIVES,
    DATA_AXIS,
    LINKS,
    PHASE_PEAKS,
    PHASES,
    SCHEMA_VERSION,
    STATES,
    TENSOR_AXIS,
    TIERS,
    RunRow,
    SearchRow,
)

__all__ = [
    "ALLOCATOR", "BETWEEN", "BETWEEN_STEPS", "CATEGORIES", "COLLECTIVES", "DATA_AXIS", "LINKS", "PHASES", "PHASE_PEAKS",
    "SCHEMA_VERSION", "STATES", "TENSOR_AXIS", "TIERS", "CertificateRow", "EventRow", "LineRow", "MemoryRow", "RunRow",
    "SearchRow", "StepRow", "TensorRow", "TimelineRow", "TrafficRow",
]  # fmt: skip
