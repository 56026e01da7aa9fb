"""`zerobench export`: finished runs for other programs, as one table of text or as files (replay's trace: perfetto.py).

A table has the swept keys among its columns: CSV, Markdown, LaTeX (pandas' Styler). LaTeX is for a paper, with the
rules of the package booktabs. A row is a cell (its newest launches combined), or, in tables other than `runs`, a row of
the table. A *head* is a column's name with the unit of all its numbers below. A number with an interval is written as
83.6 [77.1, 90.2]. A cell that is not ok shows its status instead of numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from ..host.pipes import print_line, write_text
from ..records.describe import unit_of
from ..results import selection, tables
from ..results.grid import Grid
from ..results.options import PRICED, RESULTS, Parser, add_options, add_price, verb
from ..results.printed_table import CODED, ONE_MEMORY, shares_memory
from ..results.selection import latest
from ..results.summary import price_columns, summarize
from ..sizes import counted, escape_control, printable, show_count
from .perfetto import write_perfetto

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
        frame = frame.assign(**price_columns(frame, price))
    if latest and "run_id" in frame:
        kept = selection.latest(results.runs)["run_id"]
        frame = frame[frame["run_id"].isin(kept)]
        frame = frame.assign(cell=results.of(kept).cell) if table == "runs" else frame  # of fewer: shorter names
    usual = short_columns(frame) if short and table == "runs" else list(frame.columns)
    wanted = [*dict.fromkeys(map(str.strip, columns.split(",")))] if columns else usual
    for column in wanted:
        if column not in frame.columns:
            near = get_close_matches(column, frame.columns, n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else "docs/reference/columns.md lists them"
            raise ValueError(f"--columns: {column} is no column of {table}; {hint}")
    return frame, wanted


def short_columns(runs: pd.DataFrame) -> list[str]:
    """Returns SHORT plus the columns of ELSEWHERE that any of these runs has, and the price."""
    priced = [name for name in PRICED[:1] if name in runs]
    there = [name for more in ELSEWHERE.values() for name in more if runs[name].astype("float64").gt(0).any()]
    usual = [name for column in SHORT for name in (column, *(n for n in ELSEWHERE.get(column, ()) if n in there))]
    return [*usual, *priced]


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


SCALES = {
    "bytes": (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)),
    "s": (("s", 1.0), ("ms", 1e-3), ("μs", 1e-6)),
}
"""Unit of a column -> larger and smaller units, each with its size in the column's unit, largest first."""

REPEATS_NAME = ("loss", "norm", "norm²", "number", "factor")
"""Units that repeat the column's name."""


def to_latex(
    results: tables.Results, table: str, columns: str | None, latest: bool = False, price: float | None = None
) -> str:
    """Returns the table as LaTeX. Raises ValueError for a column that does not exist."""
    if table == "runs":
        results = results.with_runs(summarize(results.runs))
    frame, wanted = select(results, table, columns, latest and table != "runs", short=False, price=price)
    if table == "runs" and columns is None:
        figures = [name for name in short_columns(frame) if name not in ("cell", "repeat", "status")]
        wanted = ["cell", *(name for name in figures if frame[name].astype("float64").fillna(0).ne(0).any())]
    text = pd.DataFrame({name: _latex_cells(frame, name) for name in wanted})
    if "status" in frame and "status" not in wanted:  # a failed cell shows its status instead of its first number
        for row in frame.index[frame["status"] != "ok"]:
            empty = text.columns[text.loc[row] == "--"]
            status = str(frame.loc[row, "status"])
            if len(empty):
                text.loc[row, empty[0]] = status
            else:
                text.loc[row, wanted[0]] += f" ({status})"
    sides = "".join("r" if _is_numeric(frame[name]) else "l" for name in wanted)
    heads, noun = [], counted(frame.get("sequence", ()))
    for name in wanted:
        head = re.sub("(?<=.)(_per_s|_bytes|_psi|_s)$", "", name).replace("_", " ")
        head = head.replace("tokens", noun) if name.startswith("tokens_per_s") else head
        unit = _latex_scale(frame, name)[0].replace("tokens /", f"{noun} /")
        heads.append(f"{head} ({unit})" if unit else head)
    text.columns = pd.Index(heads)
    style = text.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis="columns")
    rows = style.to_latex(hrules=True, column_format=sides)
    return f"{_source(frame)}\n{rows}".replace("ψ", r"$\psi$").replace("μ", r"$\mu$")  # pdfLaTeX lacks both letters


def _latex_scale(frame: pd.DataFrame, name: str) -> tuple[str, float]:
    """Returns the unit in which the column's largest number reads well, and its size in the column's own unit."""
    unit = unit_of(name) if _is_numeric(frame[name]) else ""
    scales = SCALES.get(unit)
    if scales is None:
        return "" if unit in REPEATS_NAME else unit.removeprefix("elements / "), 1.0
    largest = frame[name].astype("float64").abs().max()  # NaN if the column has no number: the smallest scale
    return next((scale for scale in scales if largest >= scale[1]), scales[-1])


def _latex_cells(frame: pd.DataFrame, name: str) -> list[str]:
    """Formats the column's values with three significant digits, four from 1 to 10, and the ends of their intervals."""
    by = _latex_scale(frame, name)[1]

    def show(value: Any, digits: int) -> str:
        return f"{value:.0f}" if value == 0 or (isinstance(value, int) and by == 1) else f"{value / by:.{digits}f}"

    cells = []
    for row in frame.to_dict("records"):
        value, low, high = row[name], row.get(f"{name}_low"), row.get(f"{name}_high")
        if pd.isna(value):
            cells.append("--")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            cells.append(printable(value))
        else:
            size = abs(value / by)
            digits = 3 if size == 0 or 1 <= size < 10 else 2 - math.floor(math.log10(min(size, 100)))
            interval = "" if pd.isna(low) or pd.isna(high) else f" [{show(low, digits)}, {show(high, digits)}]"
            cells.append(show(value, digits) + interval)
    return cells


def _is_numeric(values: pd.Series) -> bool:
    return bool(is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values))


def _source(frame: pd.DataFrame) -> str:
    """A comment: the package that the table needs and the origin of its numbers."""
    lines = [r"% \usepackage{booktabs}"]
    if {"device_class", "torch_version", "launches"} <= set(frame.columns) and len(frame):
        values = {name: sorted(set(frame[name].dropna())) for name in ("device_class", "torch_version", "launches")}
        device, torch, launches = (", ".join(map(printable, distinct)) for distinct in values.values())
        lines += [f"% {device}; torch {torch}"]
        lines += [f"% launches per cell: {launches}; [low, high]: 95 % intervals over them, or over the steps of one"]
    return "\n".join(lines)


LATEX, PARQUET, PERFETTO = "latex", "parquet", "perfetto"


@verb
def export(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 for a folder or column that does not exist."""
    parser = Parser(
        "zerobench export",
        "Writes finished runs for other programs, as in: zerobench export results/runs --out runs.csv, or"
        " zerobench export results/runs --where strategy=zero3 --format perfetto --out step.json",
    )
    parser.add_argument("runs", nargs="?", default=RESULTS, help="a results folder or a run (default: %(default)s)")
    parser.add_argument(
        "--format",
        choices=(*TEXTS, LATEX, PARQUET, PERFETTO),
        default="csv",
        help="csv, markdown: one table as text; latex: one table for a paper, a row per cell (its newest launches"
        " together), with units and 95 %% intervals, for the package booktabs; parquet: every table of all runs as one"
        " file each in the folder --out, which zerobench.load reads; perfetto: the step of all ranks (of runs with"
        " measure.events=true) as one trace in the file --out, for ui.perfetto.dev",
    )
    parser.add_argument("--table", choices=tuple(tables.ALL_TABLES), default="runs", help="for csv, markdown and latex")
    parser.add_argument("--columns", help="comma-separated; default: all for csv, a short set for runs else")
    parser.add_argument("--latest", action="store_true", help="the newest launches of each cell only")
    add_price(parser)
    add_options(parser, attempts=False)
    parser.add_argument(
        "--out", type=Path, help="a file (default: standard output; for perfetto also .json.gz); for parquet a folder"
    )
    chosen = parser.parse_args(arguments)
    if chosen.format in (PARQUET, PERFETTO) and chosen.out is None:
        parser.error(f"--format {chosen.format} needs --out {'FILE' if chosen.format == PERFETTO else 'FOLDER'}")
    if chosen.format in (PARQUET, PERFETTO) and (chosen.columns, chosen.table, chosen.price) != (None, "runs", None):
        raise ValueError(f"--format {chosen.format}: --table, --columns and --price are for csv, markdown and latex")
    if chosen.table == "searches" and (chosen.where or chosen.latest):
        raise ValueError("--table searches: --where and --latest choose runs, and a search has several")
    if chosen.price is not None and chosen.table != "runs":
        raise ValueError(f"--price {chosen.price:g}: is for --table runs")
    results, _ = tables.load(chosen.runs).chosen(chosen.where)
    if chosen.format in (PARQUET, PERFETTO):
        results = results.of(latest(results.runs)["run_id"] if chosen.latest else results.runs["run_id"])
        if chosen.format == PERFETTO:
            print_line(write_perfetto(results, chosen.out))
        else:
            sources = {path.resolve() for path in (Path(chosen.runs), *tables.collections_in(Path(chosen.runs)))}
            if (chosen.where or chosen.latest) and chosen.out.resolve() in sources:
                raise ValueError(f"--out {chosen.out}: holds other runs, which would be lost; name another folder")
            tables.collect(results, chosen.out)
            runs = show_count(len(results.runs), "run")
            print_line(f"{chosen.out}: {runs}, a table each as parquet; zerobench.load reads it")
        return 0
    if chosen.format == LATEX:
        text = to_latex(results, chosen.table, chosen.columns, chosen.latest, chosen.price)
    else:
        short = chosen.format == "markdown"
        frame, columns = select(results, chosen.table, chosen.columns, chosen.latest, short, chosen.price)
        text = TEXTS[chosen.format](frame[columns])
        records: Any = frame.to_dict("records") if short and "host_peak_bytes" in columns else []
        text += f"\n{ONE_MEMORY}\n" if shares_memory(records) else ""
    write_text(text, chosen.out)
    if chosen.out is not None:
        print_line(f"{chosen.out}: the table {chosen.table} of {chosen.runs} as {chosen.format}")
    return 0
