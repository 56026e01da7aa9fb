"""Columns of a table with units and meanings, read from its row type, for the page docs/reference/columns.md."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, dataclass, fields
from typing import get_type_hints

from .long_rows import CertificateRow, EventRow, LineRow, MemoryRow, StepRow, TensorRow, TimelineRow, TrafficRow
from .run_row import RunRow, SearchRow

ROWS: dict[str, type] = {
    "runs": RunRow, "steps": StepRow, "memory": MemoryRow, "timeline": TimelineRow, "tensors": TensorRow,
    "lines": LineRow, "traffic": TrafficRow, "events": EventRow, "certificate": CertificateRow,
    "searches": SearchRow,
}  # fmt: skip
"""Table, as `zerobench.load` names it -> its row type."""

LONG = ("steps", "memory", "timeline", "tensors", "lines", "traffic", "events", "certificate")
"""Tables with many rows per run, which have the run's id once loaded."""

SUFFIXES = {
    "bytes": "bytes", "_s": "s", "_s_low": "s", "_s_high": "s", "seconds": "s", "_psi": "elements / ψ",
    "_per_s": "tokens / s", "_per_s_low": "tokens / s", "_per_s_high": "tokens / s", "_mhz": "MHz", "_c": "°C",
    "_w": "W", "_j": "J", "_per_j": "tokens / J", "_flops": "FLOP",
    "_share": "fraction", "_deviation": "fraction", "elements": "elements",
}  # fmt: skip
"""Suffix of a numeric column's name -> its unit; the longest matching suffix wins."""

UNITS = {
    "world_size": "ranks", "group_size": "ranks", "ranks_per_gpu": "ranks", "micro_batch": "samples",
    "batch": "samples", "accumulation": "micro-batches", "sequence": "tokens", "threads": "threads",
    "cores": "cores", "psi": "parameters", "alloc_retries": "times", "skipped_steps": "steps", "calls": "operations",
    "allocations": "allocations", "lasting": "allocations", "tried": "combinations", "overlap": "fraction",
    "mfu": "fraction", "hfu": "fraction", "loss": "loss", "loss_first": "loss", "loss_last": "loss",
    "grad_norm": "norm", "grad_norm_last": "norm", "clip_norm": "norm", "grad_squares": "norm²",
    "loss_scale": "factor", "loss_scale_last": "factor", "rank": "number", "step": "number", "repeat": "number",
    "others_cores": "cores", "instant": "number", "index": "number",
    "storage": "number", "operation": "number", "stream": "number", "stride": "ranks", "flops": "FLOP",
    "seed": "number", "storages": "storages", "schema_version": "number",
    "newton_schulz_matrices": "matrices", "newton_schulz_calls": "calls", "newton_schulz_balance": "factor",
}  # fmt: skip
"""Numeric columns whose names do not end in their unit."""


RUN_ID = "The run's name in the table of runs."
PREDICTED = "predicted_"


@dataclass(frozen=True)
class Column:
    """One column of a table. `unit`: empty for text and flags; `optional`: it may be None."""

    table: str
    name: str
    kind: str
    unit: str
    optional: bool
    meaning: str


def columns_of(table: str) -> list[Column]:
    """Returns the columns of a table in ROWS, in order."""
    row = ROWS[table]
    hints, meanings = get_type_hints(row), column_meanings(row)
    columns = [Column(table, "run_id", "str", "", False, RUN_ID)] if table in LONG else []
    for field in fields(row):
        types = getattr(hints[field.name], "__args__", (hints[field.name],))
        kind = next(t for t in types if t is not type(None))
        unit = unit_of(field.name) if kind in (int, float) else ""
        optional = type(None) in types and (field.default is None or field.default is MISSING)
        columns.append(Column(table, field.name, kind.__name__, unit, optional, meanings.get(field.name, "")))
    return columns


def unit_of(name: str) -> str:
    """Returns the unit of a numeric column; empty if neither table above has it."""
    ends = [end for end in SUFFIXES if name.endswith(end)]
    return UNITS.get(name) or (SUFFIXES[max(ends, key=len)] if ends else "")


def column_meanings(row: type) -> dict[str, str]:
    """Column -> the docstring below its field, for `row` and its base classes. A prediction without one is the theory's
    value of the column that it is named after.
    """
    meanings: dict[str, str] = {}
    for kind in reversed(row.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        assert isinstance(body, ast.ClassDef)
        for node, after in zip(body.body, [*body.body[1:], None], strict=True):
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            name = node.target.id
            if isinstance(after, ast.Expr):
                assert isinstance(after.value, ast.Constant)
                meanings[name] = " ".join(str(after.value.value).split())
            elif name.startswith(PREDICTED):
                meanings[name] = f"{name.removeprefix(PREDICTED)} as the theory has it."
    return meanings
