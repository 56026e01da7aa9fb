"""Rows of a dataclass as a CSV file: the figures of the cells so far, so that a proof goes on where it stopped."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import pandas as pd

from zerobench.host.files import read_text, replace_text

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
    types = {one.name: str(one.type) for one in fields(kind)}  # type: ignore[arg-type]
    try:
        if table.fieldnames != list(types):
            raise ValueError("its columns are not those of this version")
        return [kind(**{name: _value(words, row[name]) for name, words in types.items()}) for row in table]
    except (ValueError, TypeError, csv.Error) as error:
        raise ValueError(f"{path}, line {table.line_num}: {error!s:.80}; move it away") from error


def _value(kind: str, text: str) -> Any:
    """Returns a cell as the type that a field is annotated with; empty cells of optional fields are None."""
    kind, _, optional = kind.partition(" | ")
    return None if optional and not text else TYPES[kind](text)


def write(path: Path, kind: type[Row], rows: Iterable[Row]) -> None:
    """Writes a file whole, aside and renamed: an interruption leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    table = pd.DataFrame(map(astuple, rows), columns=columns, dtype=object)  # type: ignore[arg-type]
    replace_text(path, table.to_csv(index=False))
