"""Lines of code in a comparison: which of them hold more, or less, at the peak of B than at that of A."""

from __future__ import annotations

from ...sizes import show_bytes
from ..budget.line_table import Lines
from ..budget.lines import MovedLine, moved_lines

SHOWN = 8
"""Lines that a comparison lists of a table."""

HEADER = {"peak": "lines of code at the peak", "growth": "lines of code that grow over the steps"}


def rows_of(at: str, a: Lines, b: Lines) -> list[list[str]]:
    """Returns a row per line that moved: line, bytes in A, in B, difference; none where a side has no lines.

    Lines beyond SHOWN are one row, so that the differences add up to the table's.
    """
    if at not in a or at not in b:
        return []
    moved = moved_lines(a[at], b[at])
    rows = [[_words(one), show_bytes(one.before), show_bytes(one.after), _signed(one.difference)] for one in moved]
    left = moved[SHOWN:]
    if len(left) <= 1:
        return rows
    before, after = sum(one.before for one in left), sum(one.after for one in left)
    others = [f"{len(left)} other lines", show_bytes(before), show_bytes(after), _signed(after - before)]
    return [*rows[:SHOWN], others]


def _words(one: MovedLine) -> str:
    return f"{one.line} ({one.about})" if one.about else one.line


def _signed(size: int) -> str:
    return f"{'+' if size > 0 else '−' if size < 0 else ''}{show_bytes(abs(size))}"
