"""One table of finished runs as text, with the swept keys among its columns: CSV, Markdown, LaTeX.

LaTeX is for a paper, with the rules of the package booktabs. A row is a cell (its newest launches combined), or, in
tables other than `runs`, a row of the table. A *head* is a column's name with the unit of all its numbers below. A
number with an interval is written as 83.6 [77.1, 90.2]. A cell that is not ok shows its status instead of numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from ...records.describe import unit_of
from ...results import selection, tables
from ...results.grid import Grid
from ...results.printed_table import CODED, ONE_MEMORY, shares_memory
from ...results.summary import summarize
from ...sizes import counted, escape_control, printable

SHORT = (
    "cell", "repeat", "status", "peak_bytes", "states_bytes", "predicted_states_bytes",
    "volume_psi", "wire_bytes", "step_s", "tokens_per_s", "loss_last",
)  # fmt: skip

ELSEWHERE = {
    "peak_bytes": ("host_peak_bytes", "nvme_bytes"),
    "predicted_states_bytes": ("down_bytes", "up_bytes"),
    "wire_bytes": ("between_nodes_bytes", *CODED),
}
"""Column of SHORT -> columns that follow it if any run has values for them."""


def select(
    results: tables.Results, table: str, columns: str | None, latest: bool, short: bool
) -> tuple[pd.DataFrame, list[str]]:
    """Returns the table as a frame, and the requested columns. Raises ValueError for a column that does not exist."""
    frame: pd.DataFrame = results.sweep() if table == "runs" else getattr(results, table)
    if latest and "run_id" in frame:
        kept = selection.latest(results.runs)["run_id"]
        frame = frame[frame["run_id"].isin(kept)]
        frame = frame.assign(cell=results.of(kept).cell) if table == "runs" else frame  # of fewer: shorter names
    usual = short_columns(frame) if short and table == "runs" else list(frame.columns)
    wanted = columns.split(",") if columns else usual
    for column in wanted:
        if column not in frame.columns:
            near = get_close_matches(column, frame.columns, n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else f"zerobench columns --table {table} lists them"
            raise ValueError(f"--columns: {column} is no column of {table}; {hint}")
    return frame, wanted


def short_columns(runs: pd.DataFrame) -> list[str]:
    """Returns SHORT plus the columns of ELSEWHERE that any of these runs has."""
    there = [name for more in ELSEWHERE.values() for name in more if runs[name].astype("float64").gt(0).any()]
    return [name for column in SHORT for name in (column, *(n for n in ELSEWHERE.get(column, ()) if n in there))]


def note_of(frame: pd.DataFrame, columns: list[str]) -> str:
    """Returns a note that a reader of these columns needs, to follow the table; empty if there is none."""
    shared = "host_peak_bytes" in columns and shares_memory(frame.to_dict("records"))  # type: ignore[arg-type]
    return f"\n{ONE_MEMORY}\n" if shared else ""


def to_markdown(frame: pd.DataFrame) -> str:
    """Formats a pipe table; floats with four significant digits, missing values as a dash."""

    def show(value: object) -> str:
        if pd.isna(value):  # type: ignore[call-overload]
            return "–"
        return (
            f"{value:.4g}"
            if isinstance(value, float) and value < 1e4
            else f"{value:.0f}"
            if isinstance(value, float)
            else str(value)
        )

    rows = [[show(value) for value in row] for row in frame.itertuples(index=False)]
    return Grid(list(frame.columns), rows).markdown(sides=False)


FORMULA = ("=", "+", "-", "@")
"""First characters by which a spreadsheet recognizes a formula."""


def to_csv(frame: pd.DataFrame) -> str:
    """Formats comma-separated values, floats in full, a line per row. The texts may come from others, so control
    characters are escaped, and a text that begins like a formula gets a leading apostrophe.
    """
    plain = frame.copy(deep=False)
    for name in plain.columns[[not is_numeric_dtype(dtype) for dtype in plain.dtypes]]:
        plain[name] = pd.Series([_cell(value) for value in plain[name]], index=plain.index, dtype="object")
    text: str = plain.rename(columns=_cell).to_csv(index=False)
    return text


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return f"'{escape_control(value)}" if value.startswith(FORMULA) else escape_control(value)


TEXTS: dict[str, Callable[[pd.DataFrame], str]] = {"csv": to_csv, "markdown": to_markdown}
"""Format -> function that formats a table."""


USUAL = (
    "cell", "peak_bytes", "host_peak_bytes", "nvme_bytes", "states_bytes", "predicted_states_bytes", "volume_psi",
    "between_nodes_bytes", "step_s", "tokens_per_s", "loss_last",
)  # fmt: skip
"""Default columns of runs; a column whose numbers are all 0 or missing is dropped."""

SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "[": "{[}", "–": "--", "…": r"\ldots{}", "ψ": r"$\psi$", "×": r"$\times$",
    "·": r"$\cdot$", "≥": r"$\geq$", "≤": r"$\leq$", "°": r"\textdegree{}", "²": "$^2$", "μ": r"$\mu$",
}  # fmt: skip
"""Characters that are special in LaTeX, or that pdfLaTeX lacks."""

STEPS = {
    "bytes": (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)),
    "s": (("s", 1.0), ("ms", 1e-3), ("$\\mu$s", 1e-6)),
}
"""Unit of a column -> larger and smaller units as LaTeX, each with its size in the column's unit, largest first."""

SAYS_NOTHING = ("loss", "norm", "norm²", "number", "factor")
"""Units that repeat the column's name."""


@dataclass(frozen=True)
class Scale:
    """How a column's numbers are written: divided by `by`, under a head of `name` and `unit`, both LaTeX."""

    name: str
    unit: str
    by: float = 1.0


def to_latex(results: tables.Results, table: str, columns: str | None) -> str:
    """Returns the table as LaTeX. Raises ValueError for a column that does not exist."""
    if table == "runs":
        results = results.with_runs(summarize(results.runs))
    frame, wanted = select(results, table, columns, latest=False, short=False)
    if table == "runs" and columns is None:
        wanted = [name for name in USUAL if name == "cell" or _says_something(frame[name])]
    noun = counted(frame.get("sequence", ()))
    scales = {name: scale_of(name, frame[name], noun) for name in wanted}
    lines = [_source(frame), rf"\begin{{tabular}}{{{''.join(_side(frame[name]) for name in wanted)}}}", r"\toprule"]
    lines += [_row([scales[name].name for name in wanted])]
    if any(scale.unit for scale in scales.values()):
        lines += [_row([f"({scale.unit})" if scale.unit else "" for scale in scales.values()])]
    lines += [r"\midrule", *(_cells(row, scales) for row in frame.to_dict("records"))]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def escaped(text: object) -> str:
    """Escapes a text for LaTeX, to be set literally on one line; a character that is neither ASCII nor in SIGNS becomes
    a question mark.
    """
    return "".join(SIGNS.get(sign, sign if sign.isascii() else "?") for sign in printable(text))


def scale_of(name: str, values: pd.Series, noun: str = "tokens") -> Scale:
    """Returns the scale in which the largest value of a column reads well. `noun`: see `counted`."""
    words, unit = escaped(_words(name)), unit_of(name)
    if name.startswith("tokens_per_s"):
        words, unit = words.replace("tokens", noun), unit.replace("tokens", noun)
    if not _is_numeric(values) or unit in SAYS_NOTHING:
        return Scale(words, "")
    if unit in STEPS:
        largest = float(values.astype("float64").abs().max())  # NaN, of a column without a number, is above no step
        return Scale(words, *next((step for step in STEPS[unit] if largest >= step[1]), STEPS[unit][-1]))
    return Scale(words, r"$\psi$" if unit == "elements / ψ" else escaped(unit))


def _words(name: str) -> str:
    """A column's name without the unit at its end: "predicted_states_bytes" -> "predicted states"."""
    return re.sub("(?<=.)(_per_s|_bytes|_psi|_s)$", "", name).replace("_", " ")


def _is_numeric(values: pd.Series) -> bool:
    return bool(pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values))


def _says_something(values: pd.Series) -> bool:
    return bool(values.astype("float64").fillna(0).ne(0).any())


def _side(values: pd.Series) -> str:
    return "r" if _is_numeric(values) else "l"


def _row(parts: Sequence[str]) -> str:
    return " & ".join(parts) + r" \\"


def _cells(row: Mapping[Hashable, Any], scales: dict[str, Scale]) -> str:
    """A row of the table; for a cell that is not ok, its name and its status across the empty columns."""
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
    """Digits after the decimal point that leave three significant ones, four below ten."""
    size = abs(value)
    return 0 if size >= 100 or not math.isfinite(size) else 1 if size >= 10 else 3


def _source(frame: pd.DataFrame) -> str:
    """A comment: the package that the table needs and the origin of its numbers."""
    lines = [r"% \usepackage{booktabs}"]
    if {"device_class", "torch_version", "launches"} <= set(frame.columns) and len(frame):
        told = [sorted({printable(one) for one in frame[name].dropna()}) for name in ("device_class", "torch_version")]
        counts = ", ".join(map(str, sorted({int(count) for count in frame["launches"]})))
        lines += [f"% {', '.join(told[0])}; torch {', '.join(told[1])}"]
        lines += [f"% launches per cell: {counts}; [low, high]: 95 % intervals over them, or over the steps of one"]
    return "\n".join(lines)
