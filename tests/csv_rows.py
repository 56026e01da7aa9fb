"""Rows of a dataclass as a CSV file: what machines read of a comparison."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any


def read_rows(kind: Any, file: Path) -> list[Any]:
    """Returns the rows that write_rows wrote, as objects of `kind`; none where there is no file."""
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return [kind(**{name: _value(text) for name, text in row.items()}) for row in csv.DictReader(lines)]


def _value(text: str) -> Any:
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text or None


def write_rows(kind: Any, rows: Iterable[Any], file: Path) -> None:
    """Writes a row per object of the dataclass `kind`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, [one.name for one in fields(kind)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
