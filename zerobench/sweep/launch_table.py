"""The launches of a running sweep as a table, in the terminal that runs it and in those that follow it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..results.board import Launch
from ..results.fitted_table import FittedTable
from ..sizes import printable, show_bytes

HEADER = ["cell", "", "pass", "step", "peak", "loss", "s"]
FIRST_TO_GO = ("loss", "pass", "peak", "s")
STYLES = {"ok": "green", "running": "bold", "waiting": "dim", "skipped": "dim"}

AROUND = 6
"""Lines of a terminal that are not the table's rows."""


def table_of(launches: Sequence[Launch], current: int, left: str, height: int) -> RenderableType:
    """Returns the launches around the current one, as many as `height` lines hold, and a line on the whole."""
    room = max(3, height - AROUND)
    first = max(0, min(current - room // 2, len(launches) - room))
    rows = [_row(launch) for launch in launches[first : first + room]]
    done = sum(launch.state not in ("waiting", "running") for launch in launches)
    caption = Text(f"{done} of {len(launches)} launches done; {left}", style="italic")
    return Group(FittedTable(HEADER, rows, (0, 1, 2), FIRST_TO_GO, hints=False), caption)


def _row(launch: Launch) -> list[Text]:
    peak = show_bytes(launch.peak_bytes) if launch.peak_bytes else ""
    loss = f"{launch.loss:.4f}" if launch.loss is not None else ""
    seconds = f"{launch.seconds:.0f}" if launch.seconds else ""
    state = Text(printable(launch.state), style=STYLES.get(launch.state.replace("reused", "ok"), "red"))
    figures = (launch.mode, launch.step, peak, loss, seconds)
    return [Text(printable(launch.name)), state, *(Text(printable(figure)) for figure in figures)]
