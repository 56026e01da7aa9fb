"""The part of a run's account that holds the paper's formulas beside the replay and the measurement.

A formula has no schedule. The replay's prediction knows the schedule, and is to be met to the byte: what it has beyond
the formula is in flight, and is listed by name.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from ...sizes import show_bytes
from ...theory.closed_forms import Formula, from_json
from ..text_blocks import Grid

Row = dict[str, Any]

SYMBOLS = {
    "ψ": "trained parameters",
    "φ": "frozen parameters",
    "N": "ranks that share the states",
    "k": "ranks that share a shard",
    "K": "bytes of the optimizer per parameter, masters included",
    "P": "bytes of parameters",
    "G": "bytes of gradients",
    "O": "bytes of the optimizer",
    "f": "of it leaves the device",
    "r": "reductions of a gradient",
    "m": "micro-batches",
}
"""Symbol of an equation, in words."""

COLUMNS = ["category", "formula", "in bytes", "in flight", "replayed", "measured"]
NONE = "–"


def table_of_formulas(row: Row, memory: pd.DataFrame) -> tuple[Grid | None, list[str]]:
    """The table, and lines below it; no table where theory does not cover the run, or an older zerobench made it."""
    try:
        formulas = formulas_of(row)
    except ValueError as error:
        return None, [str(error)]
    whole = memory[(memory["phase"] == "step") & (memory["tier"] == "device")]
    most = whole.groupby("category")["max_bytes"].max()
    predicted = whole.groupby("category")["predicted_bytes"].max()
    states = {name: formula for name, formula in formulas.items() if name in most}
    if not states:
        return None, []
    rows = [
        [name, one.equation, show_bytes(one.value), _bytes(predicted[name] - one.value), _bytes(predicted[name]),
         show_bytes(int(most[name]))]
        for name, one in states.items()
    ]  # fmt: skip
    lines = [_numbers(states), *(_in_flight(name, one) for name, one in states.items() if name != "states")]
    return Grid(COLUMNS, rows, left=2), [line for line in lines if line]


def volume_lines(row: Row) -> list[str]:
    """The formula of the volume, and what was moved besides, in ψ."""
    try:
        formula = formulas_of(row).get("volume")
    except ValueError:
        return []  # said above, beside the states
    if formula is None or not row["psi"]:
        return []
    terms = [f"{term.name} {term.size / row['psi']:+.3f} ψ" for term in formula.beyond]
    numbers = _numbers({"volume": formula}, without=("ψ", "N"))
    said = f"formula {formula.equation} = {formula.value / row['psi']:.3f} ψ"
    return [said + (f", with {numbers}" if numbers else ""), *([f"besides: {'; '.join(terms)}"] if terms else [])]


def between_nodes_lines(row: Row) -> list[str]:
    """The formula of the bytes that a rank sends to other nodes."""
    try:
        formula = formulas_of(row).get("between nodes")
    except ValueError:
        return []
    return [f"between nodes by formula {formula.equation} = {show_bytes(formula.value)}"] if formula else []


def formulas_of(row: Row) -> dict[str, Formula]:
    """A run's formulas by category; none of a run without a theory or by an older zerobench. Raises ValueError where
    they are damaged.
    """
    text = row["formulas"]
    return from_json(text) if isinstance(text, str) else {}


def _numbers(formulas: dict[str, Formula], without: tuple[str, ...] = ()) -> str:
    numbers = {symbol: value for one in formulas.values() for symbol, value in one.numbers.items()}
    known = [f"{s} = {value:,.10g} {SYMBOLS.get(s, '')}".rstrip() for s, value in numbers.items() if s not in without]
    return ", ".join(known)


def _in_flight(name: str, formula: Formula) -> str:
    terms = [f"{term.name} {show_bytes(term.size)}" for term in formula.beyond]
    return f"in flight, {name}: {', '.join(terms)}" if terms else ""


def _bytes(size: Any) -> str:
    return NONE if pd.isna(size) else show_bytes(int(size))
