"""What people see: progress while a sweep runs, a table at its end. A bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

MIB = 2**20


class Reporter:
    """Tells of cells as they start, step and end."""

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self._done = 0
        self._title = ""
        self._begun = 0.0
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task: Any = None

    def start(self, title: str) -> None:
        """A cell starts."""
        self._done += 1
        self._title = f"[{self._done}/{self.cells}] {title}"
        self._begun = time.monotonic()
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(f"{escape(self._title)}: starting", total=None)
        else:
            self._line(f"{self._title}: running")

    def progress(self, news: dict[str, Any]) -> None:
        """A step is done on rank 0."""
        if self._bar is not None:
            words = f"{escape(self._title)}: {news['mode']} pass, loss {news['loss']:.4f}"
            self._bar.update(self._task, description=words, completed=news["step"], total=news["steps"])

    def end(self, row: dict[str, Any], reused: bool) -> None:
        """A cell has its row."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if row["status"] == "ok":
            how = "reused an earlier run" if reused else f"{time.monotonic() - self._begun:.1f} s"
            words = f"ok, {how}, peak {row['peak_bytes'] / MIB:.1f} MiB, step {row['step_s'] * 1000:.1f} ms"
        else:
            words = f"{row['status']}: {row['reason']}"
        self._line(f"{self._title}: {words}")
        if row["status"] == "ok" and not row["passes_agree"]:
            self._line(f"{self._title}: the losses of the two passes differ; the model or device is not deterministic")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _mib(size: int) -> str:
    return f"{size / MIB:.1f}"


def _interval(row: dict[str, Any]) -> str:
    if row["step_s_low"] is None or pd.isna(row["step_s_low"]):
        return "too few steps"
    return f"{row['step_s_low'] * 1000:.1f}–{row['step_s_high'] * 1000:.1f}"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "peak MiB": lambda row: _mib(row["peak_bytes"]),
    "states MiB": lambda row: _mib(row["states_bytes"]),
    "predicted": lambda row: _mib(row["predicted_states_bytes"]),
    "volume ψ": lambda row: f"{row['volume_psi']:.3f}",
    "predicted ψ": lambda row: f"{row['predicted_volume_psi']:.3f}",
    "step ms": lambda row: f"{row['step_s'] * 1000:.1f}",
    "95 % interval": _interval,
    "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
    "last loss": lambda row: "not finite" if row["loss_last"] is None else f"{row['loss_last']:.4f}",
}

FIRST_TO_GO = ("95 % interval", "predicted ψ", "last loss", "predicted", "tokens/s")
"""What a narrow terminal does without; every column is in the tables on disk."""


def print_table(rows: list[dict[str, Any]]) -> None:
    """The sweep's table, as wide as the terminal permits, and the failed cells with their reason."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    dropped = 0
    table = _table(rows, COLUMNS)
    free = console.options.update(max_width=1000)
    while Measurement.get(console, free, table).maximum > console.width and dropped < len(FIRST_TO_GO):
        dropped += 1
        table = _table(rows, {name: c for name, c in COLUMNS.items() if name not in FIRST_TO_GO[:dropped]})
    console.print(table)
    for row in rows:
        if row["status"] != "ok":
            words = f"{_title(row)}: {row['status']}: {row['reason']}"
            console.print(words, markup=False, highlight=False, soft_wrap=True)


def _title(row: dict[str, Any]) -> str:
    return f"{row['strategy']} {row['model']} N={row['world_size']} b={row['batch']}"


def _table(rows: list[dict[str, Any]], columns: dict[str, Callable[[dict[str, Any]], str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("cell", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [show(row) if row["status"] == "ok" else "–" for show in columns.values()]
        table.add_row(_title(row), row["status"], *cells)
    return table
