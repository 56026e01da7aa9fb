"""Rows of a dataclass as a CSV file: what machines read of a comparison."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any


def write_rows(kind: Any, rows: Iterable[Any], file: Path) -> None:
    """Writes a row per object of the dataclass `kind`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, [one.name for one in fields(kind)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
