"""Estimates as files: JSON with everything, CSV with a line per cell; both have the columns of EstimateRow."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...fake_execution.parts import PARTS
from ...host.terminal import file_console
from ...results.provenance import versions
from .row import EstimateRow
from .show import show

FORM = 1
"""Version of the JSON's form."""


def as_json(rows: Sequence[EstimateRow], memory: int | None) -> str:
    """Returns `{"form", "versions", "device_memory_bytes", "estimates": [a row's fields, ...]}`."""
    whole = {
        "form": FORM,
        "versions": versions(("zerobench", "torch")),
        "device_memory_bytes": memory,
        "estimates": [row.as_dict() for row in rows],
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def as_csv(rows: Sequence[EstimateRow], memory: int | None) -> str:
    """Returns a line per cell: its fields, each part of the peak as PART_bytes, and the largest tensor."""
    text = io.StringIO()
    lines = [_flat(row) for row in rows]
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def as_table(rows: Sequence[EstimateRow], memory: int | None) -> str:
    """Returns the tables as they are printed, without color."""
    text = io.StringIO()
    show(rows, memory, file_console(text))
    return text.getvalue()


FORMS: dict[str, Callable[[Sequence[EstimateRow], int | None], str]] = {
    "table": as_table,
    "json": as_json,
    "csv": as_csv,
}
FORMATS = tuple(FORMS)


def write(rows: Sequence[EstimateRow], form: str, out: Path | None, memory: int | None = None) -> None:
    """Writes the rows to `out`, or to standard output."""
    text = FORMS[form](rows, memory)
    if out is None:
        sys.stdout.write(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)


def _flat(row: EstimateRow) -> dict[str, Any]:
    flat = row.as_dict()
    tensors, parts = row.tensors, flat.pop("parts_bytes")
    del flat["tensors"], flat["config"]
    flat |= {f"{part}_bytes": parts.get(part) for part in PARTS}
    return flat | {
        "largest_bytes": tensors[0].bytes if tensors else None,
        "largest": tensors[0].where if tensors else None,
    }
