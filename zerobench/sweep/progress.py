"""The progress display of a sweep: a table of its launches on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.live import Live

from ..host.terminal import progress_console
from ..results.board import AWAITS, RUNNING, SKIPPED, SUBMITTED, BoardLaunch, BoardWriter
from ..sizes import printable, show_bytes, show_ms
from .cell import passes_of
from .launch_table import table_of
from .remaining_time import Timing, seconds_left, seconds_left_elsewhere, timing_of
from .sweep import CellLaunch

LINE_EVERY_S = 30.0
"""Interval, in seconds, of plain lines during a long pass."""


@dataclass
class Entry(BoardLaunch):
    """A launch with its timing; None for one that takes no time: it is reused, or its cell is invalid. `begun`: when,
    on this process's clock. `elsewhere`: a job of a launcher runs it.
    """

    timing: Timing | None = None
    begun: float = 0.0
    elsewhere: bool = False


class Reporter:
    """Displays launches as they are expected, start, step and end. Use it as a context."""

    def __init__(self, board_in: Path | None = None) -> None:
        """`board_in`: the folder of the board, where that is not the results folder."""
        self._board_in = board_in
        self._places: dict[CellLaunch, int] = {}
        self.console = progress_console()
        self.entries: list[Entry] = []
        self._current = -1
        self._last_line = 0.0
        self._side_by_side = 0
        self._live: Live | None = None
        self._board: BoardWriter | None = None

    def __enter__(self) -> Reporter:
        self._board = BoardWriter()
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._table, transient=True, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._board is not None:
            self._board.take_down()
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
            self._places[launch] = len(self.entries)
            self.entries.append(Entry(_title(launch), timing=timing))

    def replace(self, launch: CellLaunch, by: CellLaunch) -> None:
        """Puts a launch in the place of one that is expected, as which it is shown: the same under another limit."""
        self._places[by] = self._places.pop(launch)

    def submit(self, launches: Sequence[CellLaunch], job: str) -> None:
        """Shows that a job of a launcher is to run launches."""
        for launch in launches:
            entry = self._entry_of(launch)
            entry.state, entry.elsewhere = SUBMITTED, True
            self._put_up_board(launch)
        more = f" and {len(launches) - 1} more" * (len(launches) > 1)
        if self._live is None:
            self.say(f"{job}: {launches[0].name}{more}")
        self._post()

    def board_in(self, results_dir: Path) -> str:
        """Returns the name of this sweep's board in a results folder, "" where it has none."""
        return self._board.name_in(results_dir) if self._board is not None else ""

    def start(self, launch: CellLaunch) -> None:
        """Starts a launch that is expected."""
        self._current = self._places[launch]
        entry = self.entry
        entry.state = RUNNING
        self._begin()
        self._side_by_side = max(self._side_by_side, sum(one.state == RUNNING for one in self.entries))
        if entry.timing is not None:
            self._put_up_board(launch)
        self._post()
        if self._live is not None:
            self._live.refresh()  # a launch may end before the next refresh
        elif not launch.cell.problems:
            self._line("running")

    def _put_up_board(self, launch: CellLaunch) -> None:
        if self._board is not None:
            self._board.put_up(self._board_in or Path(launch.cell.config.results_dir))

    def again(self, launch: CellLaunch, row: dict[str, Any]) -> None:
        """Shows that a launch ended so that it is run again."""
        entry = self._entry_of(launch)
        self._line(f"{row['status']}: {row['reason']}; it is run again, as launch.retry has it")
        entry.mode, entry.step, entry.loss, entry.peak_bytes = "", "", None, None
        entry.begun = time.monotonic()
        if entry.timing is not None:
            entry.timing = replace(entry.timing, begun={}, first={}, last={}, done={})
            entry.timing.start(entry.begun)
        self._post()

    def say(self, words: str) -> None:
        """Prints a line that belongs to no launch."""
        self.console.print(words, markup=False, highlight=False, soft_wrap=True)

    def skip(self, launch: CellLaunch) -> None:
        """Skips a launch, because an earlier one of the same cell failed."""
        entry = self._entry_of(launch)
        entry.state, entry.timing = SKIPPED, None

    def _begin(self) -> None:
        """Starts the clock of the current launch."""
        self.entry.begun = self._last_line = time.monotonic()
        if self.entry.timing is not None:
            self.entry.timing.start(self.entry.begun)

    def wait(self, waits: bool) -> None:
        """Shows that another sweep measures the current launch, and, with False, that it no longer does."""
        self.entry.mode = AWAITS if waits else ""
        if waits:
            self._line("another sweep measures this just now; waiting for what it finds")
        else:
            self._begin()
        self._post()

    def show(self, launch: CellLaunch, seen: BoardLaunch) -> None:
        """Shows a launch as the board of its job does."""
        entry = self._entry_of(launch)
        for name in ("state", "mode", "step", "loss", "peak_bytes", "seconds"):
            setattr(entry, name, getattr(seen, name))
        self._post(at_once=False)

    def progress(self, news: dict[str, Any]) -> None:
        """Records that rank 0 has finished a step."""
        entry = self.entry
        entry.mode, entry.step, entry.loss = news["mode"], f"{news['step']}/{news['steps']}", news["loss"]
        entry.peak_bytes = news.get("peak_bytes") or entry.peak_bytes
        now = time.monotonic()
        if entry.timing is not None:
            entry.timing.step(news["mode"], news["step"], now)
        entry.seconds = now - entry.begun
        self._post(at_once=False)
        if self._live is None and now - self._last_line > LINE_EVERY_S:
            self._last_line = now
            loss = f", loss {entry.loss:.4f}" if entry.loss is not None else ""
            self._line(f"{entry.mode} pass, step {entry.step}{loss}, {self._left()}")

    def end(self, launch: CellLaunch, row: dict[str, Any], reused: bool, stopped: bool = False) -> None:
        """Ends a launch with its row. `stopped`: no other launch follows, since the user interrupted."""
        entry, now = self._entry_of(launch), time.monotonic()
        entry.state, entry.seconds = row["status"], row["seconds"] if entry.elsewhere else now - entry.begun
        if entry.timing is not None and entry.elsewhere and not reused:
            entry.timing.took = entry.seconds
        elif entry.timing is not None:
            entry.timing = replace(entry.timing, ended=now) if entry.timing.done and not reused else None
        entry.peak_bytes = row.get("peak_bytes") or entry.peak_bytes
        if row["status"] == "ok":
            entry.loss = row["loss_last"]
            how = "reused an earlier run" if reused else f"{entry.seconds:.1f} s"
            words = f"ok, {how}, peak {show_bytes(row['peak_bytes'])}, step {show_ms(row['step_s'])}"
        else:
            words = f"{row['status']}: {row['reason']}"
        entry.state = "reused" if reused else entry.state
        self._post()
        if self._live is None:
            more = not (reused or stopped or all(one.is_done for one in self.entries))
            self._line(f"{words}; {self._left()}" if more else words)
        elif row["status"] != "ok":
            self._line(words)
        if row["status"] == "ok" and row["passes_agree"] is False:
            self._line("the losses of the passes differ; the model or device is not deterministic")

    @property
    def entry(self) -> Entry:
        """The current launch, or the last one."""
        return self.entries[self._current]

    def _entry_of(self, launch: CellLaunch) -> Entry:
        """Makes a launch the current one, and returns its entry."""
        self._current = self._places[launch]
        return self.entry

    def _left(self) -> str:
        """Returns the remaining time, estimated from the launches so far that were not reused."""
        timed = [entry.timing for entry in self.entries if entry.timing is not None]
        if any(entry.elsewhere for entry in self.entries):
            seconds = seconds_left_elsewhere(timed, max(1, self._side_by_side), time.monotonic())
        else:
            seconds = seconds_left(timed)
        return "time left unknown" if seconds is None else f"about {_duration(seconds)} left"

    def _line(self, text: str) -> None:
        number = f"[{self._current + 1}/{len(self.entries)}] {self.entry.name}: "
        self.console.print(printable(number + text), markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> RenderableType:
        return table_of(self.entries, self._current, self._left(), self.console.height)

    def _post(self, at_once: bool = True) -> None:
        if self._board is not None:
            self._board.write(self.entries, self._current, self._left, at_once)


def _title(launch: CellLaunch) -> str:
    return f"{launch.name}, launch {launch.repeat + 1}" if launch.cell.config.measure.repeats > 1 else launch.name


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
