"""The table of runs: the columns of a sweep's table first, then swept keys, then all that any of the runs has.

A column has `texts`, as they are shown, and `values`, which it is sorted and filtered by.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ...config.cell import CellConfig
from ...config.names import name_cells
from ...records.describe import columns_of
from ...results.printed_table import COLUMNS
from ...results.tables import Results
from ...sizes import show_bytes

Row = dict[str, Any]

LONG = ("config", "formulas")
"""Columns that are documents of their own: what differs between configs and each account tell them."""

EXACT = {
    "peak MiB": "peak_bytes", "host MiB": "host_peak_bytes", "files MiB": "nvme_bytes", "states MiB": "states_bytes",
    "formula": "floor_states_bytes", "predicted": "predicted_states_bytes", "down MiB": "down_bytes",
    "up MiB": "up_bytes", "volume ψ": "volume_psi", "predicted ψ": "predicted_volume_psi",
    "between nodes MiB": "between_nodes_bytes", "step ms": "step_s", "95 % interval": "step_s_low",
    "tokens/s": "tokens_per_s", "last loss": "loss_last", "trains": "training",
}  # fmt: skip
"""Column of a sweep's table -> the column of a run that it shows, by whose exact value it is sorted."""


@dataclass(frozen=True)
class Column:
    """A column with a text and a value per run; `shown` from the start, or when it is chosen."""

    name: str
    meaning: str
    is_number: bool
    shown: bool
    texts: list[str]
    values: list[Any]


def columns_of_runs(results: Results, sides: Sequence[str] | None = None) -> list[Column]:
    """Returns the columns of the runs, in their order. `sides`: of a comparison, the side of each run."""
    rows: list[Row] = results.runs.assign(launches=1).astype("object").to_dict("records")  # type: ignore[assignment]
    names = name_cells([CellConfig.from_json(row["config"]) for row in rows])
    found = [Column("cell", "Name of the run's cell", False, True, names, names)]
    if sides is not None:
        found.append(Column("side", "A before, B after", False, True, list(sides), list(sides)))
    status = [str(row["status"]) for row in rows]
    found.append(Column("status", "How the run ended", False, True, status, status))
    found += [_of_sweep(name, rows) for name, one in COLUMNS.items() if any(map(one.there, _ok(rows)))]
    found += _swept(results, {one.name for one in found})
    meant = {column.name: column for column in columns_of("runs")}
    for key, column in meant.items():
        values = [_plain(row[key]) for row in rows]
        if key not in (*LONG, "status") and any(value is not None for value in values):
            unit = f" ({column.unit})" if column.unit else ""
            texts = [_shown(value, column.unit) for value in values]
            found.append(Column(key, column.meaning + unit, column.kind in ("int", "float"), False, texts, values))
    return found


def _ok(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "ok"]


def _of_sweep(name: str, rows: list[Row]) -> Column:
    key, one = EXACT.get(name), COLUMNS[name]
    texts = [one.show(row) if row["status"] == "ok" else "–" for row in rows]
    ends = zip(rows, texts, strict=True)
    values = [None if row["status"] != "ok" else _plain(row[key]) if key else text for row, text in ends]
    meaning = next((column.meaning for column in columns_of("runs") if column.name == key), name)
    return Column(name, meaning, name != "trains", True, texts, values)


def _swept(results: Results, taken: set[str]) -> list[Column]:
    """Returns columns of swept keys that no column of a run has, not shown: names of cells tell them."""
    sweep = results.sweep()
    keys = [str(key) for key in sweep.columns if key not in results.runs.columns and key not in taken]
    return [
        Column(key, f"Key {key} of the config", False, False, ["–" if v is None else str(v) for v in values], values)
        for key in keys
        for values in [[_plain(value) for value in sweep[key]]]
    ]


def _plain(value: Any) -> Any:
    """Converts a value to one of JSON's."""
    if value is None or pd.isna(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _shown(value: Any, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "bytes":
        return show_bytes(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else _short(value)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def as_json(columns: Sequence[Column]) -> str:
    """Formats the columns for the page's script: texts only where they differ from values, and of a column that repeats
    itself its different values and texts, with the place among these `of` each run.
    """
    told = []
    for column in columns:
        pairs = list(zip(column.values, column.texts, strict=True))
        places = {pair: place for place, pair in enumerate(dict.fromkeys(pairs))}
        repeats = 2 * len(places) < len(pairs)
        values, texts = map(list, zip(*(places if repeats else pairs), strict=True))
        told.append(
            {"name": column.name, "meaning": column.meaning, "number": column.is_number, "shown": column.shown}
            | {"values": values}
            | ({"texts": texts} if texts != values else {})
            | ({"of": [places[pair] for pair in pairs]} if repeats else {})
        )
    # "<" would end the element that holds it
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
