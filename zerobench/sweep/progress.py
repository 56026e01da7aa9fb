"""The progress display of a sweep with the remaining time: a table of its launches on a terminal, plain lines
elsewhere.

The remaining time is estimated from the work of steps: the rest takes as long as the part that is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..config.cell import Cell, CellConfig
from ..host.environment import OMP_THREADS, SIMULATED, exported_threads
from ..host.terminal import print_on, progress_console
from ..records import RunRow
from ..results.grid import Grid
from ..sections import known
from ..sizes import printable, show_bytes, show_count, show_left, show_ms
from .cell import pass_names

LINE_EVERY_S = 30.0
"""Seconds between plain lines during a long pass."""

WAITING, SUBMITTED, RUNNING = "waiting", "submitted", "running"
"""States of a launch that is not done."""

SKIPPED, INTERRUPTED = "skipped", "interrupted"
"""States of a launch that will not run, and of one that the user stopped."""

AWAITS = "awaits"
"""Mode of a running launch that another sweep is measuring."""


@dataclass
class Entry:
    """A launch of a sweep: the fields that are displayed, and those from which the remaining time is estimated.

    `state`: waiting, submitted (its job is not over), running, skipped, reused or its run's status. `mode`:
    the pass, or AWAITS; `step`: its progress, "3/10". `seconds`: elapsed time, or its duration. `work`: of a step, in
    any unit common to all launches; None if the launch takes no time because it is reused or its cell is invalid.
    `steps`: of each of the `passes`; `done`: of all passes. `begun`: time of the start, on this process's clock.
    `elsewhere`: a launcher's job runs it.
    """

    name: str
    state: str = WAITING
    mode: str = ""
    step: str = ""
    loss: float | None = None
    peak_bytes: int | None = None
    seconds: float = 0.0
    work: float | None = None
    passes: tuple[str, ...] = ()
    steps: int = 0
    done: int = 0
    begun: float = 0.0
    elsewhere: bool = False

    @property
    def is_done(self) -> bool:
        """True once it has ended, or will not run."""
        return self.state not in (WAITING, SUBMITTED, RUNNING)


class Reporter:
    """Displays launches as they are expected, start, step and end. Use it as a context manager."""

    def __init__(self) -> None:
        self._indices: dict[Cell, int] = {}
        self.console = progress_console()
        self.entries: list[Entry] = []
        self._current = -1
        self._last_line = 0.0
        self._side_by_side = 0
        self._noted_threads = False
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

    def expect(self, launches: list[Cell], free: Callable[[Cell], bool] = lambda launch: False) -> None:
        """Adds future launches. `free`: returns True for a launch that takes no time because it is reused."""
        for launch in launches:
            number = f", launch {launch.repeat + 1}" * (launch.config.measure.repeats > 1)
            entry = Entry(launch.name + number)
            if not launch.problems and not free(launch):
                config = launch.config
                entry.work, entry.passes = step_work(config), pass_names(config, launch.repeat)
                entry.steps = config.measure.steps + config.measure.warmup
                threads = exported_threads() if config.backend != SIMULATED and not config.own_threads else None
                if threads is not None and threads == config.launch.threads and not self._noted_threads:
                    self._noted_threads = True
                    exported = f"{OMP_THREADS}={os.environ[OMP_THREADS]} is exported"
                    count = show_count(threads, "thread")
                    self.say(f"{exported}: a rank has {count}; launch.threads=N takes precedence")
            self._indices[launch] = len(self.entries)
            self.entries.append(entry)

    def replace(self, launch: Cell, by: Cell) -> None:
        """Replaces an expected launch by another that is displayed in its place: the same under another limit."""
        self._indices[by] = self._indices.pop(launch)

    def submit(self, launches: Sequence[Cell], job: str, side_by_side: int) -> None:
        """Shows that a job for these launches has been submitted, one of `side_by_side` that are not over."""
        self._side_by_side = max(self._side_by_side, side_by_side)
        for launch in launches:
            entry = self._make_current(launch)
            entry.state, entry.elsewhere = SUBMITTED, True
        if self._live is None:
            more = f" and {len(launches) - 1} more" if len(launches) > 1 else ""
            self.say(f"{job}: {launches[0].name}{more}")

    def start(self, launch: Cell) -> None:
        self._current = self._indices[launch]
        entry = self.entry
        entry.state = RUNNING
        entry.begun = self._last_line = time.monotonic()
        self._side_by_side = max(self._side_by_side, sum(each.state == RUNNING for each in self.entries))
        if self._live is not None:
            self._live.refresh()  # a launch may end before the next refresh
        elif not launch.problems:
            self._line("running")

    def again(self, launch: Cell, row: RunRow) -> None:
        entry = self._make_current(launch)
        self._line(f"{row.status}: {row.reason}; it runs again (launch.retry)")
        entry.mode, entry.step, entry.loss, entry.peak_bytes = "", "", None, None
        entry.begun, entry.done = time.monotonic(), 0

    def say(self, message: str) -> None:
        print_on(self.console, message)

    def skip(self, launch: Cell) -> None:
        """Skips a launch because an earlier one of the same cell failed."""
        entry = self._make_current(launch)
        entry.state, entry.work = SKIPPED, None

    def wait(self, waits: bool) -> None:
        """Shows that another sweep is measuring the current launch, or with False, that it no longer is."""
        self.entry.mode = AWAITS if waits else ""
        if waits:
            self._line("another sweep is measuring this cell; waiting for its result")
        else:
            self.entry.begun = self._last_line = time.monotonic()

    def progress(self, news: dict[str, Any]) -> None:
        entry = self.entry
        entry.mode, entry.step, entry.loss = news["mode"], f"{news['step']}/{news['steps']}", news["loss"]
        entry.peak_bytes = news.get("peak_bytes") or entry.peak_bytes
        now = time.monotonic()
        if entry.mode in entry.passes:
            entry.done = entry.passes.index(entry.mode) * entry.steps + news["step"]
        entry.seconds = now - entry.begun
        if self._live is None and now - self._last_line > LINE_EVERY_S:
            self._last_line = now
            loss = f", loss {entry.loss:.4f}" if entry.loss is not None else ""
            self._line(f"{entry.mode} pass, step {entry.step}{loss}, {self._left()}")

    def end(self, launch: Cell, row: RunRow, reused: bool, stopped: bool = False) -> None:
        """Ends a launch with its row. `stopped`: no other launch follows because the user interrupted."""
        entry, now = self._make_current(launch), time.monotonic()
        entry.state, entry.seconds = row.status, row.seconds if entry.elsewhere else now - entry.begun
        failed = row.status != "ok"
        if reused or (not entry.done and (failed or not entry.elsewhere)):
            entry.work = None
        elif failed:  # only the steps that it did were done in its time
            entry.passes, entry.steps = entry.passes[:1], entry.done
        entry.peak_bytes = row.peak_bytes or entry.peak_bytes
        if not failed:
            entry.loss = row.loss_last
            how = "reused an earlier run" if reused else f"{entry.seconds:.1f} s"
            message = f"ok, {how}, peak {show_bytes(row.peak_bytes)}, step {show_ms(row.step_s)}"
        else:
            message = f"{row.status}: {row.reason}"
        entry.state = "reused" if reused else entry.state
        if self._live is None:
            more = not (reused or stopped or all(each.is_done for each in self.entries))
            self._line(f"{message}; {self._left()}" if more else message)
        elif failed:
            self._line(message)
        if not failed and row.passes_agree is False:
            self._line("the losses of the passes differ; the model or device is not deterministic")

    @property
    def entry(self) -> Entry:
        return self.entries[self._current]

    def _make_current(self, launch: Cell) -> Entry:
        """Makes a launch the current one and returns its entry."""
        self._current = self._indices[launch]
        return self.entry

    def _left(self) -> str:
        seconds = seconds_left(self.entries, max(1, self._side_by_side), time.monotonic())
        return "time left unknown" if seconds is None else show_left(seconds)

    def _line(self, text: str) -> None:
        number = f"[{self._current + 1}/{len(self.entries)}] {self.entry.name}: "
        print_on(self.console, number + text)

    def _table(self) -> RenderableType:
        """Returns as many launches as fit into the terminal, with priority for running ones, and a summary line."""
        launches, room = self.entries, max(3, self.console.height - AROUND)
        near = sorted(range(len(launches)), key=lambda at: (launches[at].state != RUNNING, abs(at - self._current)))
        rows = [_row(launches[at]) for at in sorted(near[:room])]
        running, submitted = (sum(launch.state == state for launch in launches) for state in (RUNNING, SUBMITTED))
        summary = f"{sum(launch.is_done for launch in launches)} of {len(launches)} launches done"
        summary += f", {running} running" if running > 1 or submitted else ""
        summary += f", {submitted} submitted" if submitted else ""
        table = Grid(HEADER, rows, 3, FIRST_TO_GO, hints=False)
        return Group(table, Text(f"{summary}; {self._left()}", style="italic"))


def step_work(config: CellConfig) -> float:
    """Returns the work of a step: tokens times parameters, if the config has them."""
    sizes = (config.model_options.get(key) for key in ("hidden", "layers", "vocabulary"))
    hidden, layers, vocabulary = (size if isinstance(size, int) and size > 0 else 1 for size in sizes)
    ranks = 1 if config.backend == SIMULATED else config.world_size or 1
    samples = (config.micro_batch or 1) * (config.accumulation or 1) * ranks
    return float(samples * (config.sequence or 1) * (12 * layers * hidden**2 + vocabulary * hidden))


def seconds_left(launches: Sequence[Entry], side_by_side: int, now: float) -> float | None:
    """Returns the remaining seconds of launches that run `side_by_side` at a time. None until a step has taken
    time, or, in launcher jobs, a launch.
    """
    whole = done = spent = unseen = 0.0
    for launch in (launch for launch in launches if launch.work):
        work, steps = known(launch.work), launch.steps * len(launch.passes)
        whole += work * steps
        done += work * (steps if launch.is_done else launch.done)
        elapsed = launch.seconds if launch.is_done else now - launch.begun if launch.state == RUNNING else 0.0
        spent += elapsed if launch.is_done or launch.done else 0.0
        unseen += 0.0 if launch.is_done or launch.done else elapsed  # a job's steps are not seen one by one
    if whole == done:
        return 0.0
    return max(0.0, spent * (whole / done - 1) - unseen) / side_by_side if done and spent else None


HEADER = ["cell", "", "pass", "step", "peak", "loss", "s"]
FIRST_TO_GO = ("loss", "pass", "peak", "s")
STYLES = {"ok": "green", "found": "green", RUNNING: "bold", WAITING: "dim", SUBMITTED: "dim", SKIPPED: "dim"}

AROUND = 6
"""Terminal lines that are not rows of the table."""


def interruption_message(launches: Sequence[Entry]) -> str:
    """Formats "1 of 2 done, zero1 gpt_tiny N=2 b=8 interrupted; the same command resumes"."""
    cut = [launch.name for launch in launches if launch.state in (RUNNING, INTERRUPTED)]
    done = sum(launch.is_done and launch.state != INTERRUPTED for launch in launches)
    more = f" and {len(cut) - 1} more" if len(cut) > 1 else ""
    interrupted = f"{cut[0]}{more} interrupted" if cut else "interrupted"
    return f"{done} of {len(launches)} done, {interrupted}; the same command resumes"


def _row(launch: Entry) -> list[Text]:
    peak = show_bytes(launch.peak_bytes) if launch.peak_bytes else ""
    loss = f"{launch.loss:.4f}" if launch.loss is not None else ""
    seconds = f"{launch.seconds:.0f}" if launch.seconds else ""
    state = Text(printable(launch.state), style=STYLES.get(launch.state.replace("reused", "ok"), "red"))
    figures = (launch.mode, launch.step, peak, loss, seconds)
    return [Text(printable(launch.name)), state, *(Text(printable(figure)) for figure in figures)]
