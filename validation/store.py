"""Rows of a dataclass as a CSV file: the figures of the cells so far, so that a proof goes on where it stopped."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from zerobench.host.files import read_text

Row = TypeVar("Row")

TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


class Store(Generic[Row]):
    """The rows of one file, written whole after each change. `key`: names the cell of a row, which may have several;
    `order`: the cells in the order of the file, others after them.

    Raises ValueError for a file of other columns, or a damaged one.
    """

    def __init__(
        self, path: Path, kind: type[Row], key: Callable[[Row], Hashable], order: Sequence[Hashable] = ()
    ) -> None:
        self.path, self.kind, self.key = path, kind, key
        self.order = {one: number for number, one in enumerate(order)}
        self.found: dict[Hashable, list[Row]] = {}
        for row in read(path, kind):
            self.found.setdefault(key(row), []).append(row)

    def put(self, rows: Sequence[Row]) -> None:
        """Writes down the rows of one or more cells, in place of earlier ones of the same cells."""
        for cell in {self.key(row) for row in rows}:
            self.found[cell] = [row for row in rows if self.key(row) == cell]
        write(self.path, self.kind, self.rows)

    @property
    def rows(self) -> list[Row]:
        cells = sorted(self.found, key=lambda cell: self.order.get(cell, len(self.order)))
        return [row for cell in cells for row in self.found[cell]]


def read(path: Path, kind: type[Row]) -> list[Row]:
    """Returns the rows of a file; none if there is no file. Raises ValueError for a file of other columns."""
    if not os.path.lexists(path):
        return []
    table = csv.DictReader(io.StringIO(read_text(path)))
    try:
        header = list(table.fieldnames or ())
    except csv.Error:
        header = None
    if header != [one.name for one in fields(kind)]:  # type: ignore[arg-type]
        raise ValueError(f"{path}: its columns are not those of this version; move it away, or give another --out")
    try:
        return [kind(**{one.name: _value(str(one.type), row[one.name]) for one in fields(kind)})  # type: ignore[arg-type]
                for row in table]  # fmt: skip
    except (ValueError, TypeError, csv.Error) as error:
        words = f"{path}, line {table.line_num}: it is damaged ({error!s:.80}); move it away, or give another --out"
        raise ValueError(words) from error


def _value(kind: str, text: str) -> Any:
    """Returns a cell as the type that a field is annotated with; empty cells of optional fields are None."""
    kind, _, optional = kind.partition(" | ")
    return None if optional and not text else TYPES[kind](text)


def write(path: Path, kind: type[Row], rows: Iterable[Row]) -> None:
    """Writes a file whole, aside and renamed: an interruption leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    with aside.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow([one.name for one in fields(kind)])  # type: ignore[arg-type]
        out.writerows(astuple(row) for row in rows)  # type: ignore[call-overload]
    aside.replace(path)
