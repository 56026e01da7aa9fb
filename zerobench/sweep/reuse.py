"""Reuse: a cell that was measured already, by the same code, torch and class of device, is found and not run again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from glob import escape
from pathlib import Path
from typing import Any

from ..config.cell import Cell
from ..results import provenance, selection, tables

LONGEST_NAME = 80
"""Longest name of a model in the name of a run's folder: file systems permit 255 characters in all."""


def find_reusable(cell: Cell, repeat: int = 0, statuses: Sequence[str] = ("ok",)) -> dict[str, Any] | None:
    """Returns the row of an earlier run of the same cell, code, torch and device class, the `repeat`-th launch, or
    None.

    `statuses`: accepted statuses.
    """
    results_dir = Path(cell.config.results_dir)
    if cell.problems or cell.config.rerun or not results_dir.is_dir():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # runs that are unreadable, or being removed, are not reused
        rows = {folder: tables.read_row(folder) for folder in results_dir.glob(f"{escape(run_prefix(cell))}-*")}
        mine = [(folder, row) for folder, row in rows.items() if row is not None]
        wanted = [one for one in mine if one[1]["status"] in statuses and one[1]["repeat"] == repeat]
        newest = sorted(wanted, key=lambda one: (selection.split(one[0].name), one[1]["started"]), reverse=True)
        return next((row for folder, row in newest if tables.is_whole(folder)), None)


def find_elsewhere(cell: Cell, repeat: int, statuses: Sequence[str], launcher: str) -> dict[str, Any] | None:
    """Returns the row of an earlier run that a launcher has made of the same cell, code and torch, or None.

    The class of device is that of the launcher's machines, which this one does not know.
    """
    results_dir, config = Path(cell.config.results_dir), cell.config
    if cell.problems or config.rerun or not results_dir.is_dir():
        return None
    code, torch = provenance.source_of(config), provenance.versions(["torch"])["torch"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # runs that are unreadable, or being removed, are not reused
        found = [(folder, tables.read_row(folder)) for folder in results_dir.glob(f"{escape(_cell_prefix(cell))}-*")]
        mine = [
            (row["started"], folder, row) for folder, row in found
            if row is not None and row["status"] in statuses and row["repeat"] == repeat
            and (row["launcher"], row["source_hash"], row["torch_version"]) == (launcher, code, torch)
        ]  # fmt: skip
        newest = sorted(mine, key=lambda one: one[0], reverse=True)
        return next((row for _, folder, row in newest if tables.is_whole(folder)), None)


def run_prefix(cell: Cell) -> str:
    """Returns how the names of a cell's runs begin: cell, code, torch, class of device; results/selection.py has the
    rest.
    """
    return f"{_cell_prefix(cell)}-{provenance.environment_hash(cell.config)}"


def _cell_prefix(cell: Cell) -> str:
    config = cell.config
    return f"{config.strategy.name}-{config.model_name[:LONGEST_NAME]}-n{config.world_size}-{cell.cell_id}"
