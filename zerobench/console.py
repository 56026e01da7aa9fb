"""What people see: progress while a sweep runs, a table at its end. A bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markup import escape
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


COLUMNS = (
    "cell",
    "status",
    "peak MiB",
    "states MiB",
    "predicted",
    "volume ψ",
    "predicted",
    "step ms (95 % interval)",
    "tokens/s",
    "last loss",
)


def print_table(rows: Iterable[dict[str, Any]]) -> None:
    """The sweep's table, failed cells with their reason."""
    table = Table(title="zerobench", title_justify="left")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=number < 2)
    failures = []
    for row in rows:
        title = f"{row['strategy']} {row['model']} N={row['world_size']} b={row['batch']}"
        if row["status"] != "ok":
            table.add_row(title, row["status"], *["–"] * (len(COLUMNS) - 2))
            failures.append(f"{title}: {row['status']}: {row['reason']}")
            continue
        table.add_row(title, "ok", *_cells(row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)
    for line in failures:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _cells(row: dict[str, Any]) -> list[str]:
    step = f"{row['step_s'] * 1000:.1f}"
    if not pd.isna(row["step_s_low"]) and row["step_s_low"] is not None:
        step += f" ({row['step_s_low'] * 1000:.1f}–{row['step_s_high'] * 1000:.1f})"
    return [
        f"{row['peak_bytes'] / MIB:.1f}",
        f"{row['states_bytes'] / MIB:.1f}",
        f"{row['predicted_states_bytes'] / MIB:.1f}",
        f"{row['volume_psi']:.3f}",
        f"{row['predicted_volume_psi']:.3f}",
        step,
        f"{row['tokens_per_s']:.0f}",
        f"{row['loss_last']:.4f}",
    ]
