"""The progress display of a sweep with the remaining time: a table of its launches on a terminal, plain lines
elsewhere. `follow` shows it from another terminal.

The remaining time is estimated from finished launches. A pass's first step comes late, after processes have started and
the model is built. So a launch is divided into the time until the first step of each pass, the time of a step, which is
proportional to its work, and the time after the last step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..config.cell import CellConfig
from ..host.environment import SIMULATED
from ..host.terminal import print_on, progress_console
from ..results.board import AWAITS, RUNNING, SKIPPED, SUBMITTED, WAITING, BoardLaunch, BoardWriter
from ..results.grid import Grid
from ..sections import known
from ..sizes import printable, show_bytes, show_ms
from .cell import passes_of
from .sweep import CellLaunch

LINE_EVERY_S = 30.0
"""Seconds between plain lines during a long pass."""


@dataclass
class Entry(BoardLaunch):
    """A launch with its timing, None if it takes no time because it is reused or its cell is invalid. `begun`: start
    time on this process's clock. `elsewhere`: a launcher's job runs it.
    """

    timing: Timing | None = None
    begun: float = 0.0
    elsewhere: bool = False


class Reporter:
    """Displays launches as they are expected, start, step and end. Use it as a context manager."""

    def __init__(self, board_in: Path | None = None) -> None:
        """`board_in`: the folder of the board, if it is not the results folder."""
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
        """Adds future launches. `free`: returns True for a launch that takes no time because it is reused."""
        for launch in launches:
            none = launch.cell.problems or free(launch)
            config = launch.cell.config
            timing = None if none else timing_of(config, passes_of(config, launch.repeat), launch.name)
            self._places[launch] = len(self.entries)
            self.entries.append(Entry(_title(launch), timing=timing))

    def replace(self, launch: CellLaunch, by: CellLaunch) -> None:
        """Replaces an expected launch by another that is displayed in its place: the same under another limit."""
        self._places[by] = self._places.pop(launch)

    def submit(self, launches: Sequence[CellLaunch], job: str) -> None:
        for launch in launches:
            entry = self._entry_of(launch)
            entry.state, entry.elsewhere = SUBMITTED, True
            self._put_up_board(launch)
        more = f" and {len(launches) - 1} more" * (len(launches) > 1)
        if self._live is None:
            self.say(f"{job}: {launches[0].name}{more}")
        self._post()

    def board_in(self, results_dir: Path) -> str:
        """Returns the name of this sweep's board in a results folder, "" if it has none."""
        return self._board.name_in(results_dir) if self._board is not None else ""

    def start(self, launch: CellLaunch) -> None:
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
        entry = self._entry_of(launch)
        self._line(f"{row['status']}: {row['reason']}; it is run again, as launch.retry has it")
        entry.mode, entry.step, entry.loss, entry.peak_bytes = "", "", None, None
        entry.begun = time.monotonic()
        if entry.timing is not None:
            entry.timing = replace(entry.timing, begun={}, first={}, last={}, done={})
            entry.timing.start(entry.begun)
        self._post()

    def say(self, words: str) -> None:
        print_on(self.console, words)

    def skip(self, launch: CellLaunch) -> None:
        """Skips a launch because an earlier one of the same cell failed."""
        entry = self._entry_of(launch)
        entry.state, entry.timing = SKIPPED, None

    def _begin(self) -> None:
        self.entry.begun = self._last_line = time.monotonic()
        if self.entry.timing is not None:
            self.entry.timing.start(self.entry.begun)

    def wait(self, waits: bool) -> None:
        """Shows that another sweep is measuring the current launch, or with False, that it no longer is."""
        self.entry.mode = AWAITS if waits else ""
        if waits:
            self._line("another sweep is measuring this cell; waiting for its result")
        else:
            self._begin()
        self._post()

    def show(self, launch: CellLaunch, seen: BoardLaunch) -> None:
        entry = self._entry_of(launch)
        for name in ("state", "mode", "step", "loss", "peak_bytes", "seconds"):
            setattr(entry, name, getattr(seen, name))
        self._post(at_once=False)

    def progress(self, news: dict[str, Any]) -> None:
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
        """Ends a launch with its row. `stopped`: no other launch follows because the user interrupted."""
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
        return self.entries[self._current]

    def _entry_of(self, launch: CellLaunch) -> Entry:
        """Makes a launch the current one and returns its entry."""
        self._current = self._places[launch]
        return self.entry

    def _left(self) -> str:
        """Returns the remaining time, estimated from launches so far that were not reused."""
        timed = [entry.timing for entry in self.entries if entry.timing is not None]
        if any(entry.elsewhere for entry in self.entries):
            seconds = seconds_left_elsewhere(timed, max(1, self._side_by_side), time.monotonic())
        else:
            seconds = seconds_left(timed)
        return "time left unknown" if seconds is None else f"about {_duration(seconds)} left"

    def _line(self, text: str) -> None:
        number = f"[{self._current + 1}/{len(self.entries)}] {self.entry.name}: "
        print_on(self.console, number + text)

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


@dataclass
class Timing:
    """The timing of one launch. `work`: of a step, in any unit common to all launches; `steps`: of each pass. `begun`,
    `first`, `last`, `done`: by pass, clock seconds at its begin, first step and last step so far, and number of steps
    done. `ended`: the launch's end. `took`: seconds of a finished launch whose steps another machine counted.
    """

    work: float
    steps: int
    passes: tuple[str, ...]
    name: str = ""
    begun: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    ended: float | None = None
    took: float | None = None

    def start(self, now: float) -> None:
        self.begun[self.passes[0]] = now

    def step(self, mode: str, number: int, now: float) -> None:
        """Records that step `number`, from 1, of a pass is done."""
        self.begun.setdefault(mode, max(self.last.values(), default=now))
        self.first.setdefault(mode, now)
        self.last[mode], self.done[mode] = now, number

    def step_s(self, mode: str) -> float | None:
        """Returns the seconds per step; None before two steps are done."""
        several = self.done.get(mode, 0) > 1
        return (self.last[mode] - self.first[mode]) / (self.done[mode] - 1) if several else None


def timing_of(config: CellConfig, passes: tuple[str, ...], name: str) -> Timing:
    """Returns the timing of a future launch: a step's work is tokens times parameters, if the config has them."""
    found = (config.model_options.get(key) for key in ("hidden", "layers", "vocabulary"))
    hidden, layers, words = (one if isinstance(one, int) and one > 0 else 1 for one in found)
    ranks = 1 if config.backend == SIMULATED else config.world_size or 1
    samples = (config.micro_batch or 1) * (config.accumulation or 1) * ranks
    work = samples * (config.sequence or 1) * (12 * layers * hidden**2 + words * hidden)
    measure = config.measure
    return Timing(float(work), measure.steps + measure.warmup, passes, name)


def seconds_left(launches: Sequence[Timing]) -> float | None:
    """Returns the remaining seconds, None until a step has been timed. Assumes that the next step has just begun."""
    timed = [one for one in launches if any(one.step_s(mode) is not None for mode in one.passes)]
    if not timed:
        return None
    return sum(_left(one, timed) for one in launches if one.ended is None)


def seconds_left_elsewhere(launches: Sequence[Timing], side_by_side: int, now: float) -> float | None:
    """Returns the remaining seconds for launches that jobs run, `side_by_side` at a time, where only whole launches are
    timed: each takes as long as the most similar finished one. None until one has finished. Launches without `begun`
    wait.
    """
    ended = [one for one in launches if one.took is not None]
    if not ended:
        return None
    left = []
    for launch in launches:
        if launch.took is None:
            like = min(ended, key=lambda one: (one.name != launch.name, abs(log(one.work / launch.work))))
            elapsed = now - min(launch.begun.values(), default=now)
            left.append(max(0.0, known(like.took) - elapsed))
    return max([sum(left) / side_by_side, *left], default=0.0)


def _left(launch: Timing, timed: Sequence[Timing]) -> float:
    seconds = median(_after(one) for one in timed if one.ended is not None) if any(o.ended for o in timed) else 0.0
    for mode in launch.passes:
        step, done = launch.step_s(mode) or _step_like(launch, mode, timed), launch.done.get(mode, 0)
        if not done:
            seconds += _starting(timed)
        seconds += (launch.steps - done) * step
    return seconds


def _after(launch: Timing) -> float:
    assert launch.ended is not None
    return launch.ended - max(launch.last.values())


def _starting(timed: Sequence[Timing]) -> float:
    """Returns the time to a pass's first step; the very first pass, with one-time costs, counts only if it is alone."""
    spans = [one.first[mode] - one.begun[mode] for one in timed for mode in one.passes if mode in one.first]
    return median(spans[1:] or spans)


def _step_like(launch: Timing, mode: str, timed: Sequence[Timing]) -> float:
    """Returns a step's time from the most similar launch, in the same pass if possible, scaled by work."""

    def unlike(one: Timing, other: str) -> tuple[bool, bool, float]:
        return other != mode, one.name != launch.name, abs(log(one.work / launch.work))

    known = [(one, other, s) for one in timed for other in one.passes if (s := one.step_s(other)) is not None]
    nearest, _, seconds = min(known, key=lambda k: unlike(k[0], k[1]))
    return seconds * launch.work / nearest.work


HEADER = ["cell", "", "pass", "step", "peak", "loss", "s"]
FIRST_TO_GO = ("loss", "pass", "peak", "s")
STYLES = {"ok": "green", RUNNING: "bold", WAITING: "dim", SUBMITTED: "dim", SKIPPED: "dim"}

INTERRUPTED = "interrupted"
"""Status of a launch that the user stopped."""

AROUND = 6
"""Terminal lines that are not rows of the table."""


def table_of(launches: Sequence[BoardLaunch], current: int, left: str, height: int) -> RenderableType:
    """Returns as many launches as fit into `height` lines, with priority for running ones, and a summary line."""
    room = max(3, height - AROUND)
    near = sorted(range(len(launches)), key=lambda at: (launches[at].state != RUNNING, abs(at - current)))
    rows = [_row(launches[at]) for at in sorted(near[:room])]
    caption = Text(f"{summary_of(launches)}; {left}", style="italic")
    return Group(Grid(HEADER, rows, 3, FIRST_TO_GO, hints=False), caption)


def summary_of(launches: Sequence[BoardLaunch]) -> str:
    """Returns the numbers of launches that are done, are running in parallel, and wait for the launcher."""
    running, submitted = (sum(one.state == state for one in launches) for state in (RUNNING, SUBMITTED))
    words = f"{sum(one.is_done for one in launches)} of {len(launches)} launches done"
    words += f", {running} running" * (running > 1 or submitted > 0)
    return words + f", {submitted} wait for the launcher" * (submitted > 0)


def interruption_of(launches: Sequence[BoardLaunch]) -> str:
    """Formats "1 of 2 done, zero1 gpt_tiny N=2 b=8 interrupted; the same command resumes"."""
    cut = [one.name for one in launches if one.state in (RUNNING, INTERRUPTED)]
    done = sum(one.is_done and one.state != INTERRUPTED for one in launches)
    words = f"{done} of {len(launches)} done"
    words += f", {cut[0]}{f' and {len(cut) - 1} more' * (len(cut) > 1)} interrupted" if cut else ", interrupted"
    return f"{words}; the same command resumes"


def _row(launch: BoardLaunch) -> list[Text]:
    peak = show_bytes(launch.peak_bytes) if launch.peak_bytes else ""
    loss = f"{launch.loss:.4f}" if launch.loss is not None else ""
    seconds = f"{launch.seconds:.0f}" if launch.seconds else ""
    state = Text(printable(launch.state), style=STYLES.get(launch.state.replace("reused", "ok"), "red"))
    figures = (launch.mode, launch.step, peak, loss, seconds)
    return [Text(printable(launch.name)), state, *(Text(printable(figure)) for figure in figures)]
