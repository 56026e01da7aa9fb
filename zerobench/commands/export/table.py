"""One table of finished runs as text, with the swept keys among its columns: CSV, Markdown, LaTeX.

LaTeX is for a paper, with the rules of the package booktabs. A row is a cell (its newest launches combined), or, in
tables other than `runs`, a row of the table. A *head* is a column's name with the unit of all its numbers below. A
number with an interval is written as 83.6 [77.1, 90.2]. A cell that is not ok shows its status instead of numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from ...records.describe import unit_of
from ...results import selection, tables
from ...results.grid import Grid
from ...results.options import PRICED
from ...results.printed_table import CODED, ONE_MEMORY, shares_memory
from ...results.summary import price_of, summarize
from ...sizes import counted, escape_control, printable

SHORT = (
    "cell", "repeat", "status", "peak_bytes", "states_bytes", "predicted_states_bytes",
    "volume_psi", "wire_bytes", "step_s", "tokens_per_s", "loss_last",
)  # fmt: skip

ELSEWHERE = {
    "peak_bytes": ("host_peak_bytes", "nvme_bytes"),
    "predicted_states_bytes": ("down_bytes", "up_bytes"),
    "wire_bytes": ("between_nodes_bytes", *CODED),
    "tokens_per_s": ("tokens_per_j",),
}
"""Column of SHORT -> columns that follow it if any run has values for them."""


def select(
    results: tables.Results, table: str, columns: str | None, latest: bool, short: bool, price: float | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """Returns the table as a frame, and the requested columns. `price`: dollars per GPU hour, for columns of the runs.
    Raises ValueError for a column that does not exist.
    """
    frame: pd.DataFrame = results.sweep() if table == "runs" else getattr(results, table)
    if price is not None and table == "runs":
        frame = frame.assign(**price_of(frame, price))
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
    """Returns SHORT plus the columns of ELSEWHERE that any of these runs has, and the price."""
    priced = [name for name in PRICED[:1] if name in runs]
    there = [name for more in ELSEWHERE.values() for name in more if runs[name].astype("float64").gt(0).any()]
    usual = [name for column in SHORT for name in (column, *(n for n in ELSEWHERE.get(column, ()) if n in there))]
    return [*usual, *priced]


def note_of(frame: pd.DataFrame, columns: list[str]) -> str:
    """Returns a note that a reader of these columns needs, to follow the table; empty if there is none."""
    shared = "host_peak_bytes" in columns and shares_memory(frame.to_dict("records"))  # type: ignore[arg-type]
    return f"\n{ONE_MEMORY}\n" if shared else ""


def to_markdown(frame: pd.DataFrame) -> str:
    """Formats a pipe table; floats with four significant digits, missing values as a dash."""

    def show(value: Any) -> str:
        if pd.isna(value):
            return "–"
        return f"{value:{'.4g' if value < 1e4 else '.0f'}}" if isinstance(value, float) else str(value)

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
    unit: str = ""
    by: float = 1.0

    @classmethod
    def of(cls, name: str, values: pd.Series, noun: str) -> Scale:
        """Returns the scale in which the largest value of a column reads well. `noun`: see `counted`."""
        words = re.sub("(?<=.)(_per_s|_bytes|_psi|_s)$", "", name).replace("_", " ")
        unit = unit_of(name).replace("tokens /", f"{noun} /")
        if name.startswith("tokens_per_s"):
            words = words.replace("tokens", noun)
        if not _is_numeric(values) or unit in SAYS_NOTHING:
            return cls(escaped(words))
        if unit in STEPS:
            largest = float(values.astype("float64").abs().max())  # NaN, of a column without a number: above no step
            step = next((step for step in STEPS[unit] if largest >= step[1]), STEPS[unit][-1])
            return cls(escaped(words), *step)
        return cls(escaped(words), r"$\psi$" if unit == "elements / ψ" else escaped(unit))

    def show(self, value: Any, low: Any, high: Any) -> str:
        """Formats a value, with the ends of its interval if it has one."""
        if pd.isna(value):
            return "--"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return escaped(value)
        size = abs(value / self.by)
        # three significant digits, four below ten
        digits = 0 if size >= 100 or not math.isfinite(size) else 1 if size >= 10 else 3
        if pd.isna(low) or pd.isna(high):
            return self._number(value, digits)
        return f"{self._number(value, digits)} [{self._number(low, digits)}, {self._number(high, digits)}]"

    def _number(self, value: float, digits: int) -> str:
        if value == 0 or (isinstance(value, int) and self.by == 1):
            return f"{value:.0f}"
        return f"{value / self.by:.{digits}f}".replace("-", "$-$")


def to_latex(results: tables.Results, table: str, columns: str | None, price: float | None = None) -> str:
    """Returns the table as LaTeX. Raises ValueError for a column that does not exist."""
    if table == "runs":
        results = results.with_runs(summarize(results.runs))
    frame, wanted = select(results, table, columns, latest=False, short=False, price=price)
    if table == "runs" and columns is None:
        figures = [name for name in short_columns(frame) if name not in ("cell", "repeat", "status")]
        wanted = ["cell", *(name for name in figures if frame[name].astype("float64").fillna(0).ne(0).any())]
    noun = counted(frame.get("sequence", ()))
    scales = {name: Scale.of(name, frame[name], noun) for name in wanted}
    rows = []
    for row in frame.to_dict("records"):
        shown = [
            scale.show(row[name], row.get(f"{name}_low"), row.get(f"{name}_high")) for name, scale in scales.items()
        ]
        if row.get("status", "ok") != "ok" and "status" not in scales:
            place = shown.index("--") if "--" in shown else -1
            shown[place] = (shown[place] + rf" \textit{{{escaped(row['status'])}}}").removeprefix("-- ")
        rows.append(shown)
    heads = [(scale.name, f"({scale.unit})" if scale.unit else "") for scale in scales.values()]
    has_units = any(unit for _, unit in heads)
    text = pd.DataFrame(rows, columns=pd.MultiIndex.from_tuples(heads) if has_units else [name for name, _ in heads])
    sides = "".join("r" if _is_numeric(frame[name]) else "l" for name in wanted)
    return f"{_source(frame)}\n{text.to_latex(index=False, escape=False, column_format=sides, multicolumn=False)}"


def _is_numeric(values: pd.Series) -> bool:
    return bool(is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values))


def escaped(text: object) -> str:
    """Escapes a text for LaTeX, to be set literally on one line; a character that is neither ASCII nor in SIGNS becomes
    a question mark.
    """
    return "".join(SIGNS.get(sign, sign if sign.isascii() else "?") for sign in printable(text))


def _source(frame: pd.DataFrame) -> str:
    """A comment: the package that the table needs and the origin of its numbers."""
    lines = [r"% \usepackage{booktabs}"]
    if {"device_class", "torch_version", "launches"} <= set(frame.columns) and len(frame):
        values = {name: sorted(set(frame[name].dropna())) for name in ("device_class", "torch_version", "launches")}
        device, torch, launches = (", ".join(map(printable, one)) for one in values.values())
        lines += [f"% {device}; torch {torch}"]
        lines += [f"% launches per cell: {launches}; [low, high]: 95 % intervals over them, or over the steps of one"]
    return "\n".join(lines)
