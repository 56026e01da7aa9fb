"""The progress display of a sweep: a table of its launches on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..sizes import printable, show_bytes, show_ms
from .cell import passes_of
from .remaining_time import Timing, seconds_left, timing_of
from .sweep import CellLaunch

LINE_EVERY_S = 30.0
"""Interval, in seconds, of plain lines during a long pass."""

STYLES = {"ok": "green", "running": "bold", "waiting": "dim", "skipped": "dim"}


@dataclass
class Entry:
    """One line of the table: the state of a launch."""

    name: str
    state: str = "waiting"
    mode: str = ""
    step: str = ""
    loss: float | None = None
    peak_bytes: int | None = None
    seconds: float = 0.0
    timing: Timing | None = None
    """None for a launch that takes no time: it is reused, or its cell is invalid."""


class Reporter:
    """Displays launches as they are expected, start, step and end. Use it as a context."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.entries: list[Entry] = []
        self._current = -1
        self._begun = 0.0
        self._last_line = 0.0
        self._live: Live | None = None

    def __enter__(self) -> Reporter:
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._table, transient=True, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def expect(self, launches: list[CellLaunch], free: Callable[[CellLaunch], bool] = lambda launch: False) -> None:
        """Adds launches to come, after the earlier ones. `free`: True for a launch that takes no time, because it is
        reused.
        """
        for launch in launches:
            none = launch.cell.problems or free(launch)
            timing = None if none else timing_of(launch.cell.config, passes_of(launch.cell.config), launch.name)
            self.entries.append(Entry(_title(launch), timing=timing))

    def start(self, launch: CellLaunch) -> None:
        """Starts the next launch."""
        self._current += 1
        self._begun = self._last_line = time.monotonic()
        self.entry.state = "running"
        if self.entry.timing is not None:
            self.entry.timing.start(self._begun)
        if self._live is not None:
            self._live.refresh()  # a launch may end before the next refresh
        elif not launch.cell.problems:
            self._line("running")

    def say(self, words: str) -> None:
        """Prints a line that belongs to no launch."""
        self.console.print(words, markup=False, highlight=False, soft_wrap=True)

    def skip(self, launch: CellLaunch) -> None:
        """Skips the next launch, because an earlier one of the same cell failed."""
        self._current += 1
        self.entry.state = "skipped"
        self.entry.timing = None

    def wait(self) -> None:
        """Shows that another sweep measures the current launch."""
        self._line("another sweep measures this just now; waiting for what it finds")

    def progress(self, news: dict[str, Any]) -> None:
        """Records that rank 0 has finished a step."""
        entry = self.entry
        entry.mode, entry.step, entry.loss = news["mode"], f"{news['step']}/{news['steps']}", news["loss"]
        entry.peak_bytes = news.get("peak_bytes") or entry.peak_bytes
        now = time.monotonic()
        if entry.timing is not None:
            entry.timing.step(news["mode"], news["step"], now)
        entry.seconds = now - self._begun
        if self._live is None and now - self._last_line > LINE_EVERY_S:
            self._last_line = now
            loss = f", loss {entry.loss:.4f}" if entry.loss is not None else ""
            self._line(f"{entry.mode} pass, step {entry.step}{loss}, {self._left()}")

    def end(self, row: dict[str, Any], reused: bool) -> None:
        """Ends the launch with its row."""
        entry = self.entry
        now = time.monotonic()
        entry.state, entry.seconds = row["status"], now - self._begun
        if entry.timing is not None:
            entry.timing = replace(entry.timing, ended=now) if entry.timing.done and not reused else None
        entry.peak_bytes = row.get("peak_bytes") or entry.peak_bytes
        if row["status"] == "ok":
            entry.loss = row["loss_last"]
            how = "reused an earlier run" if reused else f"{entry.seconds:.1f} s"
            words = f"ok, {how}, peak {show_bytes(row['peak_bytes'])}, step {show_ms(row['step_s'])}"
        else:
            words = f"{row['status']}: {row['reason']}"
        entry.state = "reused" if reused else entry.state
        if self._live is None:
            more = self._current + 1 < len(self.entries) and not reused
            self._line(f"{words}; {self._left()}" if more else words)
        elif row["status"] != "ok":
            self._line(words)
        if row["status"] == "ok" and row["passes_agree"] is False:
            self._line("the losses of the passes differ; the model or device is not deterministic")

    @property
    def entry(self) -> Entry:
        """The current launch, or the last one."""
        return self.entries[self._current]

    def _left(self) -> str:
        """Returns the remaining time, estimated from the launches so far that were not reused."""
        seconds = seconds_left([entry.timing for entry in self.entries if entry.timing is not None])
        return "time left unknown" if seconds is None else f"about {_duration(seconds)} left"

    def _line(self, text: str) -> None:
        number = f"[{self._current + 1}/{len(self.entries)}] {self.entry.name}: "
        self.console.print(printable(number + text), markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1), caption=self._caption(), caption_justify="left")
        table.add_column("cell", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("pass", no_wrap=True)
        for name in ("step", "peak", "loss", "s"):
            table.add_column(name, justify="right", no_wrap=True)
        for entry in self._window():
            peak = show_bytes(entry.peak_bytes) if entry.peak_bytes else ""
            loss = f"{entry.loss:.4f}" if entry.loss is not None else ""
            seconds = f"{entry.seconds:.0f}" if entry.seconds else ""
            state = Text(entry.state, style=STYLES.get(entry.state.replace("reused", "ok"), "red"))
            table.add_row(escape(printable(entry.name)), state, entry.mode, entry.step, peak, loss, seconds)
        return table

    def _caption(self) -> str:
        done = sum(e.state not in ("waiting", "running") for e in self.entries)
        return f"{done} of {len(self.entries)} launches done; {self._left()}"

    def _window(self) -> list[Entry]:
        """Returns the entries around the current one, as many as the terminal has lines."""
        room = max(3, self.console.height - 6)
        first = max(0, min(self._current - room // 2, len(self.entries) - room))
        return self.entries[first : first + room]


def _title(launch: CellLaunch) -> str:
    return f"{launch.name}, launch {launch.repeat + 1}" if launch.cell.config.measure.repeats > 1 else launch.name


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
