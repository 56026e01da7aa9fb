"""Compares the runs of a sweep with DDP, and writes the verdicts into their rows (parity.py defines the comparison).

A run's reference is looked up for free among the sweep's runs, in any order, and in the results folder. If there is
none, `measure.check_training=true` creates one at the end of the sweep: a short DDP run in the folder's REFERENCES,
which is in no table; under auto the row records that there is none.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from glob import escape
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from .. import strategies
from ..config.cell import Cell, CellConfig
from ..config.flat import base_name
from ..config.plugins import HERE, LOCAL
from ..config.schema import Measure
from ..config.schema_memory import Activation, Buffers, OffloadConfig, ZeroppConfig
from ..host.environment import SIMULATED
from ..predict.fit import refuse_unfit
from ..results import tables
from ..results.folders import amend_row
from ..results.provenance import source_of
from ..results.selection import CODE
from ..sizes import show_count
from . import parity
from .cell import LONGEST_NAME, find_reusable, run_cell
from .parity import REFERENCE, UNCHECKED, Verdict

REFERENCES = ".references"
"""Folder, within a results folder, of DDP runs made for a check."""

REFERENCE_STEPS = 8
"""Steps of a reference made only for the check."""

LATE_S, LOOK_S = 70.0, 0.5
"""Maximum seconds to wait for a run written by another machine, and seconds between two checks. NFS caches attributes
of a folder for 60 s (acdirmax).
"""

ABSENT = "the run is not in its results folder"

NONE_AT_HAND = "no DDP run of the same training is in this sweep or folder; measure.check_training=true makes one"

Row = dict[str, Any]


class ParityCheck:
    """Collects the rows of a sweep as they are written; rows without a reference wait for one."""

    def __init__(self) -> None:
        self._references: dict[str, tuple[Row, CellConfig, pd.DataFrame]] = {}
        self._waiting: list[tuple[Cell, Row]] = []
        self._late: list[tuple[Cell, Row]] = []

    def see(self, cell: Cell, row: Row) -> None:
        """Handles a finished run; its verdict, once known, is written into `row` and the run's folder."""
        if row["status"] != "ok" or row["backend"] == SIMULATED or cell.config.measure.check_training == "false":
            return
        if not _is_there(cell, row):  # it could not be written there, or is not visible on this machine yet
            row |= {"training": UNCHECKED, "training_words": ABSENT}
            self._late += [(cell, row)] if _may_be_late(row) else []
            return
        key = _key(cell.config, row)
        if row["strategy"] == strategies.reference().name:
            self._references.setdefault(key, (row, cell.config, _steps(_folder(cell, row))))
            _write(cell, row, Verdict(REFERENCE, "is the reference of the others"))
            ready = [pair for pair in self._waiting if _key(pair[0].config, pair[1]) == key]
            self._waiting = [pair for pair in self._waiting if not any(pair is other for other in ready)]
            for waiting in ready:
                self._judge(*waiting)
        elif self._find(cell, row):
            self._judge(cell, row)
        else:
            self._waiting.append((cell, row))

    def finish(self, makes: bool, say: Callable[[str], None], run: Callable[[Cell], Row] | None = None) -> bool:
        """Ends the sweep: waits for late runs; for rows without a reference, makes one or writes a note. Returns False
        if the user interrupts.

        `makes`: permits new references. `say`: prints a line. `run`: reuses or runs a cell where the sweep's cells ran,
        by default on this machine.
        """
        stopped = makes and not self._see_late(say)
        makes &= not stopped
        waiting, self._waiting = self._waiting, []
        for cell, row in waiting:
            why = NONE_AT_HAND
            if makes and cell.config.measure.check_training == "true" and not self._find(cell, row):
                say(f"{base_name(cell.config)}: DDP trains the same for a few steps, to check it")
                try:
                    why = self._make(cell, row, run or run_here)
                except KeyboardInterrupt:
                    return False
            if _key(cell.config, row) in self._references:
                self._judge(cell, row)
            else:
                _write(cell, row, Verdict(UNCHECKED, why))
        return not stopped

    def _see_late(self, say: Callable[[str], None]) -> bool:
        """Waits for runs of other machines that are not visible here yet. Returns False if the user interrupts."""
        late, self._late = self._late, []
        absent = sum(not _is_there(*pair) for pair in late)
        if absent:
            say(f"{show_count(absent, 'run')} of other machines cannot be seen here yet: up to {LATE_S:.0f} s more")
        try:
            _wait_for(late)
            stopped = False
        except KeyboardInterrupt:
            stopped = True
        for pair in late:
            self.see(*pair)
        return not stopped

    def _judge(self, cell: Cell, row: Row) -> None:
        _, config, steps = self._references[_key(cell.config, row)]
        try:
            own = _steps(_folder(cell, row))
        except OSError:  # removed meanwhile
            _write(cell, row, Verdict(UNCHECKED, ABSENT))
        else:
            _write(cell, row, parity.compare(cell.config, own, config, steps))

    def _find(self, cell: Cell, row: Row) -> bool:
        """Returns whether there is a reference, searching the results folder if the sweep has none yet."""
        key, config = _key(cell.config, row), cell.config
        name = escape(config.model_name[:LONGEST_NAME])
        pattern = f"{strategies.reference().name}-{name}-n{config.world_size}-*"
        if key not in self._references:
            for folder in Path(config.results_dir).glob(pattern):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # an unreadable run is not a reference
                    row = tables.read_row(folder) or {"status": ""}
                if row["status"] == "ok":
                    config = CellConfig.from_json(row["config"])
                    if _key(config, row) == key and tables.is_whole(folder):
                        self._references.setdefault(key, (row, config, _steps(folder)))
        return key in self._references

    def _make(self, cell: Cell, row: Row, run: Callable[[Cell], Row]) -> str:
        """Runs DDP for a few steps, or reuses such a run; returns "" or why there is still no reference."""
        config, reference = cell.config, strategies.reference()
        # all steps except one are warm-up, which also has norms
        steps = min(REFERENCE_STEPS, config.measure.steps + config.measure.warmup - 1)
        open_precision = replace(config.precision, gradient_dtype=None, wire_dtype=None, tile_bytes=None)
        made = cell.changed(
            strategy=reference.options(**reference.reference or {}),
            precision=open_precision.resolved(reference.name, config.device, config.optimizer),
            measure=Measure(1, steps, repeats=1, check_training=config.measure.check_training, passes="timed"),
            results_dir=str(Path(config.results_dir) / REFERENCES),
            offload=OffloadConfig(), activation=Activation(), buffers=Buffers(), zeropp=ZeroppConfig(),
            arena=False, node_size=None, shard_group=None,
        )  # fmt: skip
        made_row = run(made)
        if made_row["status"] != "ok":
            return f"DDP, its reference: {made_row['status']}: {made_row['reason']}"
        if _may_be_late(made_row):
            _wait_for([(made, made_row)])
        if not _is_there(made, made_row):
            return f"DDP, its reference: {ABSENT}"
        self._references[_key(cell.config, row)] = made_row, made.config, _steps(_folder(made, made_row))
        return ""


def run_here(cell: Cell) -> Row:
    """Returns the row of a cell, reused or new. Raises StoppedError if the user interrupts."""
    return find_reusable(cell) or asdict(run_cell(refuse_unfit(cell), lambda _: None))


def _key(config: CellConfig, row: Row) -> str:
    code = {name: row[name] for name in CODE}
    if code["source_hash"] == source_of(config):  # a user's strategy is code that its reference does not run
        code["source_hash"] = source_of(replace(config, strategy=strategies.reference().options()))
    return " ".join([parity.training_key(config), *map(str, code.values())])


def _folder(cell: Cell, row: Row) -> Path:
    return Path(cell.config.results_dir) / str(row["run_id"])


def _may_be_late(row: Row) -> bool:
    """Whether another machine may have written the run."""
    return row["launcher"] not in (LOCAL, *HERE)


def _wait_for(runs: list[tuple[Cell, Row]]) -> None:
    """Waits until all runs are visible, for at most LATE_S."""
    deadline = time.monotonic() + LATE_S
    while not all(_is_there(*pair) for pair in runs) and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def _is_there(cell: Cell, row: Row) -> bool:
    return (_folder(cell, row) / "steps.parquet").is_file()


def _steps(folder: Path) -> pd.DataFrame:
    steps: pd.DataFrame = pq.read_table(folder / "steps.parquet").to_pandas()
    return steps


def _write(cell: Cell, row: Row, verdict: Verdict) -> None:
    changes = {
        "training": verdict.kind,
        "training_words": verdict.message,
        "loss_deviation": verdict.loss,
        "grad_norm_deviation": verdict.norm,
    }
    if any(row[name] != value for name, value in changes.items()):
        row |= changes
        with suppress(OSError, ValueError):  # a read-only folder: the next sweep that reuses the run tries again
            amend_row(_folder(cell, row), changes)
