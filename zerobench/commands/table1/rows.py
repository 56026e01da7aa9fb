"""Rows of the executed table, as csv: one per cell, and one per line of code that holds states in it.

cells.csv       formula, executed and printed, with the parts of each
in_flight.csv   what the states consist of when their sum is largest; the parts add up to `executed_bytes`
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from ...fake_execution import Execution
from ...host.files import read_text
from ...predict.estimate import training_shapes
from ...records import STATES
from ...strategies import shape_of
from ...theory.closed_forms import floor_bytes, state_formulas
from ...theory.replay.states import predict_states
from .cells import Place
from .paper import SIZES, formula_bytes, how_printed, printed

GB = 1e9


@dataclass(frozen=True)
class CellRow:
    """One executed cell. Bytes are of the fullest rank, the states at the instant when their sum is largest."""

    size: str
    ranks: int
    strategy: str
    variant: str
    model: str
    psi: int
    """Parameters of the executed model."""
    printed_gb: str
    """Number that the paper prints, in 1e9 bytes; empty where it has no such cell."""
    paper_formula_bytes: int
    """The paper's formula at its own round size."""
    how_printed: str
    """exact, rounded, cut off, or misprint: the printed number beside the formula at the round size."""
    formula_bytes: int
    """Formula of the paper at `psi`."""
    executed_bytes: int
    """Model states of the execution: parameters, gradients, master weights, optimizer, and buffers on their way."""
    replayed_bytes: int
    """Expectation of theory's replay for `executed_bytes`, from the order that the execution had."""
    parameters_bytes: int
    gradients_bytes: int
    master_bytes: int
    optimizer_bytes: int
    communication_bytes: int
    parameters_formula_bytes: int
    gradients_formula_bytes: int
    master_formula_bytes: int
    optimizer_formula_bytes: int
    peak_bytes: int
    """With activations and all else."""
    bucket_bytes: int
    tile_bytes: int
    rank: int
    execution_s: float
    resident_bytes: int
    """The most memory of this machine's that the process of its execution has had."""


@dataclass(frozen=True)
class StatesRow:
    """Storages of a cell's states that one line of code made, at the instant of `executed_bytes`."""

    size: str
    ranks: int
    strategy: str
    variant: str
    category: str
    source: str
    """The line that made them."""
    name: str
    """Label of the largest of them."""
    storages: int
    bytes: int


def row_of(place: Place, found: Execution) -> CellRow:
    """Returns the row of an execution that went well."""
    config, record = found.config, found.known
    strategy, groups, trained = shape_of(config.strategy.values()), config.groups, training_shapes(config)
    schedule = record.schedule
    psi = sum(shape.numel for shape in schedule.shapes if shape.trainable)
    formulas = state_formulas(strategy, schedule.shapes, groups, *trained)
    whole = formula_bytes(SIZES[place.size], place.ranks, place.strategy)
    text = printed(place.size, place.ranks, place.strategy)
    parts = {f"{category}_bytes": found.at_most_states[category] for category in STATES}
    expected = {
        f"{category}_formula_bytes": formulas[category].value for category in STATES if category != "communication"
    }
    return CellRow(
        place.size, place.ranks, place.strategy, place.variant, config.model_name, psi, text, round(whole),
        how_printed(text, whole / GB) if text else "", floor_bytes(strategy, schedule.shapes, groups, *trained),
        found.states_bytes, predict_states(strategy, schedule, place.ranks, *trained, groups).states_bytes,
        **parts, **expected, peak_bytes=found.peak_bytes,
        bucket_bytes=int(getattr(config.strategy, "bucket_bytes", 0) or 0),
        tile_bytes=trained[1].tile_bytes or 0, rank=found.rank, execution_s=round(found.seconds, 1),
        resident_bytes=found.resident_bytes,
    )  # fmt: skip


def states_of(place: Place, found: Execution) -> list[StatesRow]:
    """Returns the parts of the states, by line of code, the largest first."""
    where = (place.size, place.ranks, place.strategy, place.variant)
    lines = [line for line in found.known.lines if line.at == "states"]
    return [StatesRow(*where, one.category, one.source, one.name, one.storages, one.bytes) for one in lines]


def read(path: Path, kind: type) -> list[Any]:
    """Returns the rows of a csv; none where there is no file. Raises ValueError for a file of other columns."""
    if not os.path.lexists(path):
        return []
    table = csv.DictReader(io.StringIO(read_text(path)))
    if _header(table) != [one.name for one in fields(kind)]:
        raise ValueError(f"{path}: its columns are not those of this version; move it away, or give another --out")
    types = {"int": int, "float": float, "str": str}
    try:
        return [kind(**{one.name: types[str(one.type)](row[one.name]) for one in fields(kind)}) for row in table]
    except (ValueError, TypeError, csv.Error) as error:
        words = f"{path}, line {table.line_num}: it is damaged ({error!s:.80}); move it away, or give another --out"
        raise ValueError(words) from error


def _header(table: csv.DictReader[str]) -> list[str] | None:
    """Returns the names in the first line; None where it is none of a table."""
    try:
        return list(table.fieldnames or ())
    except csv.Error:
        return None


def write(path: Path, kind: type, rows: Iterable[Any]) -> None:
    """Writes a csv whole, aside and renamed: an interruption leaves the one before."""
    aside = path.with_name(f".{path.name}")
    with aside.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow([one.name for one in fields(kind)])
        out.writerows(astuple(row) for row in rows)
    aside.replace(path)


def place_of(row: CellRow | StatesRow) -> Place:
    """Returns the place that a row is of."""
    return Place(row.size, row.ranks, row.strategy, row.variant)


def in_order(rows: Iterable[Any], every: Sequence[Place]) -> list[Any]:
    """Returns rows in the table's order, whichever was executed first."""
    order = {place: number for number, place in enumerate(every)}
    return sorted(rows, key=lambda row: order.get(place_of(row), len(order)))
