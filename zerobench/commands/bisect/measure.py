"""A commit's figures: measured in a worktree of its own, or remembered.

A result is kept by the commit's tree, the command and the environment (Python, installed packages, device), so that
commits of equal content are measured once and a second search is free. A commit that cannot be measured is not kept:
its reason may lie outside of the commit.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from ...config.cell import CellConfig
from ...config.names import name_cells
from ...host.temporary import claim
from ...records import LineRow
from ...results import provenance, tables
from ...results.frames import frame_of
from ...results.options import Where
from ...results.selection import matching
from ..revisions import Commit, worktree
from ..run_to_end import Ended
from .launch import is_sweep

Row = dict[str, Any]
Launcher = Callable[[Path, Path], Ended]
"""Runs the command: worktree, folder for the runs -> how it ended."""

MEASURED = "measured.json"
"""The file of a remembered commit that says what was measured, beside the folder `runs`."""

STATUS = "status"
"""The metric that is a word: ok, or why a cell is not."""


@dataclass(frozen=True)
class Range:
    """A metric that differs from launch to launch: its least and its largest value."""

    low: float
    high: float


@dataclass(frozen=True)
class Measured:
    """A commit's cells by name, and their rows of code. `problem`: why it cannot be measured; empty where it was.

    `again`: the cells of launches after the first.
    """

    commit: Commit
    cells: dict[str, Row] = field(default_factory=dict)
    lines: pd.DataFrame = field(default_factory=lambda: frame_of([], LineRow).assign(run_id=""))
    problem: str = ""
    again: tuple[dict[str, Row], ...] = ()

    def value(self, cell: str, metric: str) -> Any:
        """Returns a metric of a cell, a Range where its launches differ; None where the cell is missing, has failed, or
        has no such figure.
        """
        values = [_value(cells.get(cell), metric) for cells in (self.cells, *self.again)]
        if any(one is None for one in values) or len(set(values)) == 1:
            return values[0] if len(set(values)) == 1 else None
        return None if metric == STATUS else Range(min(values), max(values))

    def reason(self, cell: str) -> str:
        """Says why there is no value of a cell."""
        row = self.cells.get(cell)
        if self.problem or row is None:
            return self.problem or f"it has no cell {cell}"
        return f"{cell} is {row['status']}: {row['reason']}" if row["status"] != "ok" else f"{cell} has no such figure"


def _value(row: Row | None, metric: str) -> Any:
    return None if row is None or (row["status"] != "ok" and metric != STATUS) else row[metric]


@dataclass
class Bench:
    """Measures commits. `runs`: how many were run, `remembered`: how many were not. `launches`: of each run.

    `told`: hears of each commit before it is run or read, and whether it is remembered.
    """

    repository: Path
    command: tuple[str, ...]
    cache: Path
    launch: Launcher
    where: Sequence[Where] = ()
    rerun: bool = False
    launches: int = 1
    told: Callable[[Commit, bool], None] = lambda *_: None
    runs: int = 0
    remembered: int = 0
    measured: dict[str, Measured] = field(default_factory=dict)

    def known(self, commit: Commit) -> bool:
        """Returns True where a commit needs no run."""
        return commit.hash in self.measured or (not self.rerun and (self._entry(commit) / MEASURED).is_file())

    def measure(self, commit: Commit) -> Measured:
        """Returns a commit's figures; runs the command where they are not known."""
        if commit.hash not in self.measured:
            self.measured[commit.hash] = self._remember(commit) if self.known(commit) else self._measure(commit)
        return self.measured[commit.hash]

    def _remember(self, commit: Commit) -> Measured:
        self.remembered += 1
        self.told(commit, True)
        return self._read(commit, self._entry(commit))

    def _measure(self, commit: Commit) -> Measured:
        self.runs += 1
        self.told(commit, False)
        self.cache.mkdir(parents=True, exist_ok=True)
        entry = self._entry(commit)
        aside = claim(self.cache, ".claim-", ".partial-", entry.name, mode=0o777)
        try:
            with worktree(self.repository, commit.hash) as place:
                for name in self._folders():
                    ended = self.launch(place, aside.path / name)
            about = {"commit": commit.hash, "tree": commit.tree, "command": self.command, "worktree": str(place)}
            (aside.path / MEASURED).write_text(json.dumps(about | surroundings(), indent=1))
            found = self._read(commit, aside.path, ended)
            if not found.problem:
                _replace(aside.path, entry)
            else:
                _discard(aside.path)
        except BaseException:
            _discard(aside.path)
            raise
        finally:
            aside.release()
        return found

    def _entry(self, commit: Commit) -> Path:
        what = json.dumps([self.command, surroundings(), self._instrument(), self.launches], sort_keys=True)
        return self.cache / f"{commit.tree[:16]}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"

    def _folders(self) -> list[str]:
        """Returns the names of the folders of the launches' runs."""
        return ["runs", *(f"runs{number}" for number in range(2, self.launches + 1))]

    def _instrument(self) -> str:
        """Returns the hash of this zerobench, unless the commits bring one of their own."""
        own = is_sweep(self.command) and (self.repository / "zerobench/cli.py").is_file()
        return "" if own else provenance.source_hash("")

    def _read(self, commit: Commit, entry: Path, ended: Ended | None = None) -> Measured:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged run is a missing cell, which is told
            launches = [tables.load(entry / name) for name in self._folders()]
        if any(one.runs.empty for one in launches):
            return Measured(commit, problem=_why_nothing(ended))
        place = json.loads((entry / MEASURED).read_text())["worktree"]
        lines = launches[0].lines
        lines = lines.assign(source=[shown.replace(f"{place}/", "") for shown in lines["source"]])
        cells, *again = (cells_of(matching(one.runs, self.where)) for one in launches)
        return Measured(commit, cells, lines, again=tuple(again))


def cells_of(runs: pd.DataFrame) -> dict[str, Row]:
    """Returns a row per run by its cell's name; of several runs of a name the later ones are numbered from 2."""
    found: dict[str, Row] = {}
    rows: list[Row] = [{str(k): None if pd.isna(v) else v for k, v in row.items()} for row in runs.to_dict("records")]
    for name, row in zip(name_cells([CellConfig.from_json(row["config"]) for row in rows]), rows, strict=True):
        number = 1 + sum(other == name or other.startswith(f"{name} #") for other in found)
        found[name if number == 1 else f"{name} #{number}"] = row
    return found


@cache
def surroundings() -> dict[str, Any]:
    """Returns what else than a commit and a command determines figures: Python, packages, device."""
    device = provenance.device_class("cuda") if torch.cuda.is_available() else "cpu"
    installed = sorted({f"{one.name}=={one.version}" for one in distributions()})
    words = "\n".join(installed).encode()
    return {"python": platform.python_version(), "prefix": sys.prefix, "torch": torch.__version__, "device": device,
            "packages": hashlib.sha256(words).hexdigest()[:12]}  # fmt: skip


def _why_nothing(ended: Ended | None) -> str:
    if ended is None:
        return "its remembered runs are gone; --rerun measures it again"
    if ended.code:
        return f"the command ended with exit code {ended.code}: {ended.said}"
    return ended.said if ended.code is None else "the command left no run: watch a loop in it, or write to {runs}"


def _replace(aside: Path, entry: Path) -> None:
    """Renames a finished entry to its place; an earlier one of the same key goes."""
    _discard(entry)
    aside.rename(entry)


def _discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
