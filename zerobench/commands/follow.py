"""`zerobench status --follow`: sweeps that other processes, or other machines, run into a results folder.

A sweep reports its progress on its board (results/board.py). On a terminal the boards are drawn in place until the last
one is removed; otherwise each change is a line. Jobs of a launcher are on the board of their sweep, and have boards of
their own, which are followed if the sweep was killed and its jobs continue. A run without a board comes from a command
that is not a sweep: it is named while it is being written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..host.temporary import is_claimed
from ..host.terminal import is_quiet, stdout_console
from ..results.board import AWAITS, RUNNING, SUBMITTED, WAITING, Board, BoardLaunch, board_folders, is_up, read_board
from ..results.folders import PARTIAL
from ..results.leftovers import boards_of_orphans
from ..sizes import printable, show_bytes
from ..sweep.progress import table_of
from .text_blocks import say

SILENT_S = 60.0
"""Seconds after which an unchanged board is reported as silent."""


@dataclass
class Followed:
    """A folder's sweeps, as far as known. `boards`: the active ones, by their folder; `heard`: times of their last
    changes, on the clock of this process. `killed`: titles of sweeps that left their board behind; `writing`: runs that
    are being written and are on no board.
    """

    where: Path
    boards: dict[Path, Board] = field(default_factory=dict)
    heard: dict[Path, float] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    writing: list[str] = field(default_factory=list)

    def read(self) -> bool:
        """Reads the boards again; returns True while a sweep or another run is in progress."""
        there = board_folders(self.where) + boards_of_orphans(self.where)
        up = [path for path in there if is_up(path)]
        for path in [path for path in self.boards if path not in up]:
            gone = self.boards.pop(path)
            if path.exists():
                self.killed.append(gone.title)
        for path in up:
            board = read_board(path)
            if board is not None and board != self.boards.get(path):
                self.boards[path], self.heard[path] = board, time.monotonic()
        runs = [] if up else [path for path in sorted(self.where.glob(f"{PARTIAL}*")) if is_claimed(path)]
        self.writing = [name_of(path) for path in runs]
        return bool(up or runs)

    def silence(self, board: Board) -> str:
        """Returns a note on how long a board has not changed, if that is long; else empty."""
        seconds = time.monotonic() - self.heard[board.path]
        return f"; no news for {seconds:.0f} s" if seconds > SILENT_S else ""


def follow(where: Path, every_s: float) -> int:
    """Follows the sweeps of a results folder to their end. Returns the exit code: 1 if one was killed, else 0.
    Raises FileNotFoundError if there is no such folder.
    """
    if not where.is_dir():
        raise FileNotFoundError(f"{where}: there is no such results folder; `zerobench experiment=stages` makes one")
    followed = Followed(where)
    console = stdout_console()
    with _display(followed, console) as update:
        any_yet = False
        while followed.read():
            any_yet = True
            update()
            time.sleep(every_s)
        update()
    words = [f"{title}: killed" for title in followed.killed]
    words += [] if any_yet else ["no sweep writes here now"]
    for sentence in words:
        say(console, sentence)
    return int(bool(followed.killed))


@contextmanager
def _display(followed: Followed, console: Console) -> Iterator[Callable[[], None]]:
    if is_quiet() or not console.is_terminal:
        yield (lambda: None) if is_quiet() else Lines(followed, console)
        return
    with Live(picture(followed, console), console=console, auto_refresh=False, transient=True) as live:
        yield lambda: live.update(picture(followed, console), refresh=True)


def picture(followed: Followed, console: Console) -> Group:
    """Draws the boards one below the other, within the terminal's height."""
    boards = list(followed.boards.values())
    parts = []
    for board in boards:
        parts.append(Text(printable(board.title), style="bold"))
        left = board.left + followed.silence(board)
        parts.append(table_of(board.launches, board.current, left, console.height // len(boards) - 1))  # type: ignore[arg-type]
    parts += [Text(printable(f"being written now: {name}")) for name in followed.writing]
    return Group(*parts)


@dataclass
class Lines:
    """A line for each change."""

    followed: Followed
    console: Console
    told: dict[tuple[Path, int], str] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)

    def __call__(self) -> None:
        """Prints the changes."""
        for board in self.followed.boards.values():
            for number, launch in enumerate(board.launches):
                words = in_words(launch)
                before = self.told.get((board.path, number), WAITING)
                self.told[board.path, number] = words
                if words != before:
                    more = f"; {board.left}" if number == board.current else ""
                    say(self.console, f"[{number + 1}/{len(board.launches)}] {launch.name}: {words}{more}")
        for name in self.followed.writing:
            if name not in self.named:
                say(self.console, f"being written now: {name}")
        self.named = set(self.followed.writing)


def in_words(launch: BoardLaunch) -> str:
    """Returns the state of a launch, with its pass while it runs and its figures when it is done."""
    if launch.state == RUNNING and launch.mode == AWAITS:
        return "another sweep measures it"
    if launch.state == RUNNING:
        return f"running, {launch.mode} pass" if launch.mode else "running"
    if launch.state == SUBMITTED:
        return "its job waits for the launcher"
    if launch.state not in ("ok", "reused"):
        return launch.state
    peak = f", peak {show_bytes(launch.peak_bytes)}" if launch.peak_bytes else ""
    return f"{launch.state}{f', {launch.seconds:.1f} s' if launch.state == 'ok' else ''}{peak}"


def name_of(partial: Path) -> str:
    """Returns the prefix of a run's name, without the random suffix that its folder has until it is complete."""
    return partial.name.removeprefix(PARTIAL).rsplit("-", 1)[0]
