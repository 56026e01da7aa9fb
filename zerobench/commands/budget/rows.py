"""The rows that budgets are recorded from and checked against: one per cell, of new runs or of those in a folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pandas as pd

from ...config.cell import Cell, CellConfig
from ...config.flat import name_cells
from ...config.identity import work_id
from ...records import RunRow
from ...results import selection, tables
from ...results.frames import frame_of
from ...results.provenance import device_class
from ...results.selection import CODE, latest
from ...results.summary import summarize
from ...results.tables import Results
from ...sizes import show_count
from ...sweep.command import run_cells
from .file import environment_of
from .judge import METRICS
from .line_table import LinesOfRuns


class UnjudgedError(ValueError):
    """Raised where nothing can be judged; the message is the sentence."""


def environment_of_cell(cell: Cell) -> str:
    """Names the kind of device and the torch version that a budget of the cell is good for."""
    return environment_of(device_class(cell.config.device), version("torch"))


def run_rows(cells: list[Cell]) -> list[dict[str, Any]]:
    """Runs cells, finished ones reused, and summarizes them. Raises KeyboardInterrupt where the user stops it."""
    code, rows = run_cells(cells)
    if code == 130:
        raise KeyboardInterrupt
    ids = {row["run_id"] for row in rows}
    folders = dict.fromkeys(cell.config.results_dir for cell in cells if not cell.problems)
    found = tables.merge([tables.load(folder).of(ids) for folder in folders])
    return summaries(frame_of(rows, RunRow), found)


def finished_rows(chosen: argparse.Namespace, keep: Callable[[pd.DataFrame], pd.DataFrame]) -> list[dict[str, Any]]:
    """Returns the rows of --runs that --where selects and, without --all, `keep` keeps."""
    results = tables.load(chosen.runs)
    if results.runs.empty:
        raise UnjudgedError(f"{chosen.runs} holds no runs")
    runs = selection.matching(results.runs, chosen.where)
    kept = runs if chosen.all else keep(runs)
    if kept.empty:
        raise UnjudgedError(f"{chosen.runs}: every run there failed; --all takes failed attempts, too")
    if len(kept) < len(runs):
        number = show_count(len(runs) - len(kept), "failed or superseded run")
        print(f"{chosen.runs}: {number} left out; --all takes them")
    return summaries(kept, results.of(runs["run_id"]))


def summaries(runs: pd.DataFrame, results: Results) -> list[dict[str, Any]]:
    """Returns a row per cell, with its name, work and environment, the largest tensor at its peak in words, and its
    lines of code. `results`: the tables of these runs.
    """
    tensors, launches, lines = results.tensors, latest(runs), LinesOfRuns(results.lines)
    rows: list[Any] = summarize(runs).to_dict("records")
    configs = [CellConfig.from_json(row["config"]) for row in rows]
    for row, config, name in zip(rows, configs, name_cells(configs), strict=True):
        mine = tensors[tensors["run_id"] == row["run_id"]].sort_values("bytes", ascending=False)
        row |= {"name": name, "work": work_id(config)}
        row["environment"] = environment_of(row["device_class"], row["torch_version"])
        top = next(mine.itertuples(), None)
        name = (top.name or top.module or f"made in {top.phase}") if top else ""
        row["largest"] = f"{name} ({top.category}, {top.bytes:,} B)" if top else ""
        row["launched"] = _launched(row, results.runs)
        row["lines"] = lines.of(launches[launches["cell_id"] == row["cell_id"]]["run_id"])
    return rows


def _launched(row: dict[str, Any], runs: pd.DataFrame) -> dict[str, list[float]]:
    """Returns metric -> its values in all launches of a cell by the same code, of one commit of the user's."""
    mine = runs[(runs["cell_id"] == row["cell_id"]) & (runs["status"] == "ok")]
    for column in (*CODE, "commit"):
        mine = mine[mine[column].isna() if pd.isna(row[column]) else mine[column] == row[column]]
    return {metric: [float(v) for v in mine[metric].dropna()] for metric in METRICS if metric in mine}
