"""Published figures of the ZeRO literature: formula, executed value and printed value; the difference, and if it is
within the printed precision. Misprints are marked with the right value. About two minutes.

An executed value is a slope: two models, one with more layers than the other, are executed, one rank of each, and how
much more the larger holds or moves is divided by how much larger it is. What does not grow with the model is `in
flight`: a bucket, a gathered block, logits. Nothing else is taken off.

    python -m validation published                            all of them, to results/published
    python -m validation published --only megatron,offload    of these sources, on standard output
    python -m validation published --list                     formulas and printed values alone: nothing is executed

ZeRO's table 1, cell by cell: python -m validation table1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from zerobench.config.keys import nearest
from zerobench.results.grid import Grid
from zerobench.sizes import show_count

from .figure import Reproduced, reproduce
from .sources import SOURCES

FOLDER = Path("results/published")

LEAST_SHARE = 0.001
"""Fraction of the larger cell's quantity: a smaller part in flight is padding, left out of texts."""

COLUMNS: dict[str, Callable[[Reproduced], Any]] = {
    "source": lambda one: SOURCES[one.source].label,
    "where": lambda one: one.row.where,
    "quantity": lambda one: one.row.quantity,
    "unit": lambda one: one.row.unit,  # of all values but in_flight
    "equation": lambda one: one.row.equation,
    "formula": lambda one: one.row.formula,
    "executed": lambda one: one.executed,  # the slope: additional bytes or traffic over the additional size
    "whole": lambda one: one.whole,  # the larger cell's quantity over its size: the same with what is in flight
    "in_flight": lambda one: None if one.in_flight is None else sum(one.in_flight.values()),  # does not grow
    "in_flight_parts": lambda one: parts_of(one),  # by category or collective
    "printed": lambda one: one.row.printed,
    "value": lambda one: one.row.value,  # the printed value in the unit, at the cell's numbers
    "difference": lambda one: one.difference,  # executed minus value; minus the formula if the source is misprinted
    "within": lambda one: one.is_within,  # a unit of the last printed digit, or 0.1 % of a printed equation
    "verdict": lambda one: one.verdict,
    "cell": lambda one: f"{one.row.cell} {one.row.sizes[-1]}",  # the larger cell; `zerobench` runs it
}
"""Column -> its value in a row."""


def record_of(one: Reproduced) -> dict[str, Any]:
    return {name: value(one) for name, value in COLUMNS.items()}


def parts_of(one: Reproduced) -> str:
    """Returns what is in flight, in words: "gradients 8.4e+06, communication 1.7e+07"."""
    parts, least = one.in_flight or {}, LEAST_SHARE * (one.total or 0.0)
    return ", ".join(f"{name} {_number(size)}" for name, size in parts.items() if abs(size) > least)


HEADER = ("where", "quantity", "unit", "formula", "simulated", "in flight", "printed", "within")


def cells_of(one: Reproduced) -> list[str]:
    row = one.row
    formula = _number(row.formula)
    named = formula if formula in row.equation else f"{row.equation} = {formula}"
    printed = row.printed if _number(row.value) in row.printed else f"{row.printed} = {_number(row.value)}"
    within = {True: "yes", False: "no", None: "–"}[one.is_within]
    if row.misprint:
        within += ", misprint"
    executed = "–" if one.executed is None else _number(one.executed)
    return [row.where, row.quantity, row.unit, named, executed, parts_of(one) or "–", printed, within]


def remarks(found: Sequence[Reproduced]) -> list[str]:
    """A sentence for each row that is misprinted, differs, or was not executed."""
    return [f"{one.row.where}, {one.row.quantity}: {one.verdict}" for one in found if one.verdict not in ("", "yes")]


def as_markdown(found: Sequence[Reproduced]) -> str:
    """A table per source, with remarks below it."""
    sections = []
    for name, group in groupby(found, key=lambda one: one.source):
        mine, source = list(group), SOURCES[name]
        table = Grid(HEADER, [cells_of(one) for one in mine], {*HEADER} - {"simulated"}).markdown(is_markdown=True)
        lines = [f"## {source.label}", "", f"{source.citation}.", "", table, *(f"- {line}" for line in remarks(mine))]
        sections.append("\n".join(lines).rstrip())
    return "\n\n".join(sections) + "\n"


def _number(value: float) -> str:
    """Five significant digits, without zeros at the end."""
    return f"{value:.5g}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="SOURCE", help=f"of these, comma-separated: {', '.join(SOURCES)}")
    parser.add_argument("--list", action="store_true", help="formulas and printed values alone; nothing is executed")


def run(chosen: argparse.Namespace) -> int:
    """Executes the figures; writes published.csv and published.md, or prints the page. Returns 1 if one failed."""
    names = list(SOURCES) if chosen.only is None else chosen.only.split(",")
    for name in names:
        if name not in SOURCES:
            raise ValueError(f"--only {name}: no such source{nearest(name, list(SOURCES))}")
    rows = [(name, row) for name in dict.fromkeys(names) for row in SOURCES[name].rows]
    found = [Reproduced(*row) for row in rows] if chosen.list else reproduce(rows)
    if chosen.only or chosen.list:
        print(as_markdown(found), end="")
    else:
        write(found, FOLDER)
        print(f"{show_count(len(found), 'row')} in {FOLDER}", *remarks(found), sep="\n", file=sys.stderr)
    return int(any(one.problem for one in found))


def write(found: Sequence[Reproduced], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(map(record_of, found), dtype=object).to_csv(folder / "published.csv", index=False)
    (folder / "published.md").write_text(as_markdown(found))
