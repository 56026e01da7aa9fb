"""`zerobench export`: tables of finished runs as CSV or Markdown, swept keys among the columns, or all of them as a
collection of parquet files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

from ..config.cell import CellConfig
from ..config.names import name_cells
from ..results import tables
from ..results.conditions import add_options
from ..results.printed_table import CODED, ONE_MEMORY, shares_memory
from ..results.selection import chosen as chosen_runs
from ..sizes import printable

SHORT = (
    "cell", "repeat", "status", "peak_bytes", "states_bytes", "predicted_states_bytes",
    "volume_psi", "wire_bytes", "step_s", "tokens_per_s", "loss_last",
)  # fmt: skip

ELSEWHERE = {
    "peak_bytes": ("host_peak_bytes", "nvme_bytes"),
    "predicted_states_bytes": ("down_bytes", "up_bytes"),
    "wire_bytes": ("between_nodes_bytes", *CODED),
}
"""Column of SHORT -> columns that follow it where any run has values for them."""


def export(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 for a folder or column that does not exist."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.format == "parquet" and chosen.out is None:
        parser.error("--format parquet needs --out FOLDER")
    try:
        if chosen.format == "parquet":
            results, _ = chosen_runs(tables.load(chosen.runs), chosen.where)
            kept = tables.latest(results.runs)["run_id"] if chosen.latest else results.runs["run_id"]
            tables.collect(results.of(kept), chosen.out)
            return 0
        results, _ = chosen_runs(tables.load(chosen.runs), chosen.where)
        short = chosen.format == "markdown"
        frame, columns = select(results, chosen.table, chosen.columns, chosen.latest, short)
    except (FileNotFoundError, ValueError) as error:
        print(printable(f"zerobench export: {error}"), file=sys.stderr)
        return 2
    shown = frame[columns]
    text = shown.to_csv(index=False) if chosen.format == "csv" else to_markdown(shown) + _note(frame, columns)
    if chosen.out is None:
        sys.stdout.write(text)
    else:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zerobench export",
        description="Writes a table of finished runs, as in: zerobench export results/runs --format csv --out runs.csv",
    )
    parser.add_argument(
        "runs", nargs="?", default="results/runs", help="a results folder or a run (default: %(default)s)"
    )
    parser.add_argument(
        "--format",
        choices=("csv", "markdown", "parquet"),
        default="csv",
        help="parquet: every table of all runs as one file each in the folder --out; zerobench.load reads it",
    )
    parser.add_argument("--table", choices=tuple(tables.ALL_TABLES), default="runs", help="for csv and markdown")
    parser.add_argument("--columns", help="comma-separated; default: all for csv, a short set for markdown runs")
    parser.add_argument("--latest", action="store_true", help="the newest run of each cell only")
    add_options(parser, attempts=False)
    parser.add_argument("--out", type=Path, help="a file (default: standard output); for parquet a folder")
    return parser


def select(
    results: tables.Results, table: str, columns: str | None, latest: bool, short: bool
) -> tuple[pd.DataFrame, list[str]]:
    """Returns the table as a frame, and the requested columns. Raises ValueError for one that it does not have."""
    frame: pd.DataFrame = results.sweep() if table == "runs" else getattr(results, table)
    if latest and "run_id" in frame:
        kept = tables.latest(results.runs)["run_id"]
        frame = frame[frame["run_id"].isin(kept)]
    if table == "runs" and len(frame):
        frame = frame.assign(cell=name_cells([CellConfig.from_json(config) for config in frame["config"]]))
    elif table == "runs":
        frame = frame.assign(cell=pd.Series(dtype="object"))
    usual = short_columns(frame) if short and table == "runs" else list(frame.columns)
    wanted = columns.split(",") if columns else usual
    for column in wanted:
        if column not in frame.columns:
            raise ValueError(f"--columns: {column} is no column of {table}; it has {', '.join(frame.columns)}")
    return frame, wanted


def short_columns(runs: pd.DataFrame) -> list[str]:
    """Returns SHORT, and those of ELSEWHERE that any of these runs has."""
    there = [name for more in ELSEWHERE.values() for name in more if runs[name].astype("float64").gt(0).any()]
    return [name for column in SHORT for name in (column, *(n for n in ELSEWHERE.get(column, ()) if n in there))]


def _note(frame: pd.DataFrame, columns: list[str]) -> str:
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

    lines = ["| " + " | ".join(frame.columns) + " |", "|" + " --- |" * len(frame.columns)]
    lines += ["| " + " | ".join(show(v) for v in row) + " |" for row in frame.itertuples(index=False)]
    return "\n".join(lines) + "\n"
