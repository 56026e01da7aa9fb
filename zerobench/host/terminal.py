"""The consoles of a command: tables and answers on standard output, progress on standard error.

rich decides on color (NO_COLOR, FORCE_COLOR, TERM=dumb, a pipe). The width is the terminal's, or the variable COLUMNS.
A file or a pipe has no width: its console is *endless*.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console

from ..sizes import printable

FILE_WIDTH = 160
"""Width, in characters, at which text is wrapped in a file, if all columns fit."""

ENDLESS = 100_000

LINE_EVERY_S = 10.0
"""Seconds between lines of progress in a pipe."""

_silenced = 0


class Output(Console):
    """A console for tables. `told`: hints below tables that it has already printed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.told: set[str] = set()


def stdout_console() -> Output:
    """Returns a console on standard output, as wide as the terminal or COLUMNS; otherwise endless."""
    console = Output()
    return console if console.is_terminal or os.environ.get("COLUMNS", "").isdigit() else Output(width=ENDLESS)


def file_console(file: TextIO) -> Output:
    """Returns an endless console on a file."""
    return Output(file=file, width=ENDLESS)


def print_on(console: Console, text: object, style: str = "") -> None:
    """Prints a text on one line, however long; a newline in it is escaped, like any control character."""
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def progress_console() -> Console:
    """Returns a console on standard error, for progress; it prints nothing if the command is quiet."""
    return Console(stderr=True, quiet=is_quiet())


@contextmanager
def progress_bar(title: str, total: int, noun: str) -> Iterator[Callable[..., None]]:
    """Draws a bar on standard error while the block runs; yields the function that sets how many are done, or without
    an argument adds one. Its `name` is given when an item that a user knows by name is finished.

    If standard error is not a terminal, prints a line for each name, and otherwise after LINE_EVERY_S. Prints nothing
    if the command is quiet.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn(noun), TimeElapsedColumn())
    console = progress_console()
    last = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def advance(done: int | None = None, name: str = "") -> None:
            nonlocal last
            progress.update(task, completed=done, advance=1 if done is None else None)
            if not console.is_terminal and (name or time.monotonic() - last >= LINE_EVERY_S):
                last = time.monotonic()
                item = f" {name} done," if name else ""
                print_on(console, f"{title}:{item} {progress.tasks[0].completed:g} of {total} {noun}")

        yield advance


def is_endless(console: Console) -> bool:
    """Returns True if lines may have any length."""
    return console.width >= ENDLESS


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses progress, notes and hints: only results and errors are printed."""
    global _silenced
    _silenced += 1
    try:
        yield
    finally:
        _silenced -= 1


def is_quiet() -> bool:
    """Returns True inside `quiet`."""
    return _silenced > 0
