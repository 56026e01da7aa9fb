"""The launches of a running sweep as a table, in the terminal that runs it and in those that follow it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..results.board import RUNNING, SKIPPED, SUBMITTED, WAITING, BoardLaunch
from ..results.grid import Grid
from ..sizes import printable, show_bytes

HEADER = ["cell", "", "pass", "step", "peak", "loss", "s"]
FIRST_TO_GO = ("loss", "pass", "peak", "s")
STYLES = {"ok": "green", RUNNING: "bold", WAITING: "dim", SUBMITTED: "dim", SKIPPED: "dim"}

INTERRUPTED = "interrupted"
"""Status of a launch that the user has stopped."""

AROUND = 6
"""Lines of a terminal that are not the table's rows."""


def table_of(launches: Sequence[BoardLaunch], current: int, left: str, height: int) -> RenderableType:
    """Returns the launches that run and those around the current one, as many as `height` lines hold, and a line on the
    whole.
    """
    room = max(3, height - AROUND)
    near = sorted(range(len(launches)), key=lambda at: (launches[at].state != RUNNING, abs(at - current)))
    rows = [_row(launches[at]) for at in sorted(near[:room])]
    caption = Text(f"{summary_of(launches)}; {left}", style="italic")
    return Group(Grid(HEADER, rows, 3, FIRST_TO_GO, hints=False), caption)


def summary_of(launches: Sequence[BoardLaunch]) -> str:
    """Returns the numbers of launches that are done, run side by side and wait for the launcher of their jobs."""
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
