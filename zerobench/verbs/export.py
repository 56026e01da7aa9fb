"""`zerobench export`: tables of finished runs as CSV or Markdown, or all of them as a collection of parquet files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pandas as pd

from .. import tables
from ..naming import name_cells

SHORT = (
    "cell", "repeat", "status", "peak_bytes", "states_bytes", "predicted_states_bytes",
    "volume_psi", "wire_bytes", "step_s", "tokens_per_s", "loss_last",
)  # fmt: skip


def export(arguments: list[str]) -> int:
    """The verb. Returns the exit code: 0, or 2 for a folder or column that is not there."""
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
    parser.add_argument("--out", type=Path, help="a file (default: standard output); for parquet a folder")
    chosen = parser.parse_args(arguments)
    if chosen.format == "parquet" and chosen.out is None:
        parser.error("--format parquet needs --out FOLDER")
    try:
        if chosen.format == "parquet":
            results = tables.load(chosen.runs)
            kept = tables.latest(results.runs)["run_id"] if chosen.latest else results.runs["run_id"]
            tables.collect(results.of(kept), chosen.out)
            return 0
        frame = select(chosen.runs, chosen.table, chosen.columns, chosen.latest, short=chosen.format == "markdown")
    except (FileNotFoundError, ValueError) as error:
        print(f"zerobench export: {error}", file=sys.stderr)
        return 2
    text = frame.to_csv(index=False) if chosen.format == "csv" else to_markdown(frame)
    if chosen.out is None:
        sys.stdout.write(text)
    else:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(text)
    return 0


def select(path: str, table: str, columns: str | None, latest: bool, short: bool) -> pd.DataFrame:
    """The table as a frame. Raises ValueError for a column that it does not have."""
    results = tables.load(path)
    frame: pd.DataFrame = getattr(results, table)
    if latest and "run_id" in frame:
        kept = tables.latest(results.runs)["run_id"]
        frame = frame[frame["run_id"].isin(kept)]
    if table == "runs" and len(frame):
        frame = frame.assign(cell=name_cells([json.loads(config) for config in frame["config"]]))
    elif table == "runs":
        frame = frame.assign(cell=pd.Series(dtype="object"))
    wanted = columns.split(",") if columns else list(SHORT) if short and table == "runs" else list(frame.columns)
    for column in wanted:
        if column not in frame.columns:
            raise ValueError(f"--columns: {column} is no column of {table}; it has {', '.join(frame.columns)}")
    return frame[wanted]


def to_markdown(frame: pd.DataFrame) -> str:
    """A pipe table; floats with four significant digits, what is missing as a dash."""

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
