r"""One table of finished runs for a paper: LaTeX with the lines of the package booktabs.

A row is a cell: its newest launches together, or in other tables than `runs` a row of the table. A *head* is a column's
name with its unit below, in which all its numbers are. A number that has an interval carries it: 83.6 [77.1, 90.2]. A
cell that is not ok has its status in place of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ...records.describe import unit_of
from ...results import tables
from ...results.summary import summarize
from ...sizes import printable
from .table import select

USUAL = (
    "cell", "peak_bytes", "host_peak_bytes", "nvme_bytes", "states_bytes", "predicted_states_bytes", "volume_psi",
    "between_nodes_bytes", "step_s", "tokens_per_s", "loss_last",
)  # fmt: skip
"""Columns of runs unless others are chosen, less those in which no cell has a number but 0."""

SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "[": "{[}", "–": "--", "…": r"\ldots{}", "ψ": r"$\psi$", "×": r"$\times$",
    "·": r"$\cdot$", "≥": r"$\geq$", "≤": r"$\leq$", "°": r"\textdegree{}", "²": "$^2$", "μ": r"$\mu$",
}  # fmt: skip
"""Signs that mean something to LaTeX, or that pdfLaTeX lacks."""

SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
TIMES = (("s", 1.0), ("ms", 1e-3), ("$\\mu$s", 1e-6))
SAYS_NOTHING = ("loss", "norm", "norm²", "number", "factor")
"""Units that repeat the column's name."""


@dataclass(frozen=True)
class Scale:
    """How a column's numbers are written: divided by `by`, below a head of `name` and `unit`, both LaTeX."""

    name: str
    unit: str
    by: float = 1.0


def to_latex(results: tables.Results, table: str, columns: str | None) -> str:
    """Returns the table as LaTeX. Raises ValueError for a column that it does not have."""
    if table == "runs":
        results = results.with_runs(summarize(results.runs))
    frame, wanted = select(results, table, columns, latest=False, short=False)
    if table == "runs" and columns is None:
        wanted = [name for name in USUAL if name == "cell" or _says_something(frame[name])]
    scales = {name: scale_of(name, frame[name]) for name in wanted}
    lines = [_source(frame), rf"\begin{{tabular}}{{{''.join(_side(frame[name]) for name in wanted)}}}", r"\toprule"]
    lines += [_row([scales[name].name for name in wanted])]
    if any(scale.unit for scale in scales.values()):
        lines += [_row([f"({scale.unit})" if scale.unit else "" for scale in scales.values()])]
    lines += [r"\midrule", *(_cells(row, scales) for row in frame.to_dict("records"))]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def escaped(text: object) -> str:
    """Returns a text as LaTeX that sets it letter by letter, on one line; for a sign that is neither of ASCII nor in
    SIGNS a question mark.
    """
    return "".join(SIGNS.get(sign, sign if sign.isascii() else "?") for sign in printable(text))


def scale_of(name: str, values: pd.Series) -> Scale:
    """Returns the scale in which the largest value of a column reads well."""
    unit = unit_of(name)
    if not _is_numeric(values):
        return Scale(escaped(_words(name)), "")
    largest = float(values.astype("float64").abs().max())
    largest = 0.0 if math.isnan(largest) else largest
    for kind, steps in (("bytes", SIZES), ("s", TIMES)):
        if unit == kind:
            word, by = next(((word, by) for word, by in steps if largest >= by), steps[-1])
            return Scale(escaped(_words(name)), word, by)
    if unit == "elements / ψ":
        return Scale(escaped(_words(name)), r"$\psi$")
    return Scale(escaped(_words(name)), "" if unit in SAYS_NOTHING else escaped(unit))


def _words(name: str) -> str:
    """A column's name without the unit at its end: "predicted_states_bytes" -> "predicted states"."""
    for end in ("_per_s", "_bytes", "_psi", "_s"):
        if name.endswith(end) and name != end:
            name = name.removesuffix(end)
            break
    return name.replace("_", " ")


def _is_numeric(values: pd.Series) -> bool:
    return bool(pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values))


def _says_something(values: pd.Series) -> bool:
    return bool(values.astype("float64").fillna(0).ne(0).any())


def _side(values: pd.Series) -> str:
    return "r" if _is_numeric(values) else "l"


def _row(parts: Sequence[str]) -> str:
    return " & ".join(parts) + r" \\"


def _cells(row: Mapping[Hashable, Any], scales: dict[str, Scale]) -> str:
    """A row: of a cell that is not ok its name, and its status across the columns that it leaves empty."""
    shown = [_show(row, name, scale) for name, scale in scales.items()]
    if row.get("status", "ok") == "ok" or "status" in scales:
        return _row(shown)
    kept = next((place for place, text in enumerate(shown) if text == "--"), len(shown))
    if kept == len(shown) or any(text != "--" for text in shown[kept:]):
        return _row([*shown[:-1], rf"{shown[-1]} (\textit{{{escaped(row['status'])}}})"])
    across = rf"\multicolumn{{{len(shown) - kept}}}{{l}}{{\textit{{{escaped(row['status'])}}}}}"
    return _row([*shown[:kept], across])


def _show(row: Mapping[Hashable, Any], name: str, scale: Scale) -> str:
    value = row[name]
    if pd.isna(value):
        return "--"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return escaped(value)
    low, high = (row.get(f"{name}_{end}") for end in ("low", "high"))
    digits = _digits(value / scale.by)
    if not isinstance(low, int | float) or not isinstance(high, int | float) or pd.isna(low) or pd.isna(high):
        return _number(value, scale, digits)
    ends = ", ".join(_number(end, scale, digits) for end in (low, high))
    return f"{_number(value, scale, digits)} [{ends}]"


def _number(value: float, scale: Scale, digits: int) -> str:
    if value == 0 or (isinstance(value, int) and scale.by == 1):
        return f"{value:.0f}"
    return f"{value / scale.by:.{digits}f}".replace("-", "$-$")


def _digits(value: float) -> int:
    """Digits behind the point that leave three that count, four below ten."""
    size = abs(value)
    return 0 if size >= 100 or not math.isfinite(size) else 1 if size >= 10 else 3


def _source(frame: pd.DataFrame) -> str:
    """A comment: what the table needs and where its numbers come from."""
    lines = [r"% \usepackage{booktabs}"]
    if {"device_class", "torch_version", "launches"} <= set(frame.columns) and len(frame):
        told = [sorted({printable(one) for one in frame[name].dropna()}) for name in ("device_class", "torch_version")]
        counts = ", ".join(map(str, sorted({int(count) for count in frame["launches"]})))
        lines += [f"% {', '.join(told[0])}; torch {', '.join(told[1])}"]
        lines += [f"% launches per cell: {counts}; [low, high]: 95 % intervals over them, or over the steps of one"]
    return "\n".join(lines)
