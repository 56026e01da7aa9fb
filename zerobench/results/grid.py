"""A table of text, rendered for a terminal, fitted to its width, and as Markdown and CSV; markup.html has its HTML.

A column of *words* may be wrapped between words; a column of *figures* is shown whole or not at all. At its *natural*
width a table has each cell on one line. If the terminal is narrower:

    1. squeeze    margins are dropped, words and headings are wrapped
    2. leave out  columns are dropped, the least important first, and a line below the table names them; or
    2. continue   if no order of importance is given, or the columns were requested by name, the columns that do not fit
                  continue in another table below, after the first column again

A file has no width: it gets all columns, with words wrapped if that keeps lines within FILE_WIDTH.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Literal

from rich.align import Align
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from ..host.terminal import FILE_WIDTH, Output, is_endless, is_quiet
from ..sizes import escape_control, printable

FOLDED = 20
"""Least width of a column of words, in characters, if its content is that wide."""

LONGEST_WORD = 32
"""Longest word, in characters, that a column is kept wide enough for; a longer one is broken."""

Columns = tuple[int, ...]
"""Indices of columns, in display order."""

GridCell = str | Text
"""Text of a cell; a *marked* one is a Text with a style, bold where fonts are available."""


@dataclass(frozen=True)
class Grid:
    """A table, a renderable of rich. `rows`: cells, one line each. `left`: names of its columns of words, or the number
    of them if they come first; all others are figures, aligned right. `first_to_go`: names of columns in the order in
    which a narrow terminal drops them, followed by the others from the right; None: none is dropped. `chosen`: names of
    columns to show, in addition to the first; empty: all; None: those that fit. `hints`: a line names the dropped
    columns.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[GridCell]]
    left: int | Collection[str] = 1
    first_to_go: Sequence[str] | None = None
    chosen: Sequence[str] | None = None
    hints: bool = True

    @cached_property
    def words(self) -> frozenset[int]:
        """Indices of the columns of words."""
        if isinstance(self.left, int):
            return frozenset(range(self.left))
        return frozenset(place for place, name in enumerate(self.header) if name in self.left)

    @cached_property
    def _cells(self) -> list[list[Text]]:
        return [[one if isinstance(one, Text) else Text(printable(one)) for one in row] for row in self.rows]

    def markdown(self, sides: bool = True, is_markdown: bool = False) -> str:
        """Returns a pipe table. `sides`: align columns of figures right. `is_markdown`: cells are Markdown already."""
        ruler = ["---" if place in self.words or not sides else "--:" for place in range(len(self.header))]
        shown = (lambda text: text.replace("|", "\\|")) if is_markdown else markdown_text
        lines = [[shown(str(one)) for one in row] for row in (self.header, *self.rows)]
        return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], ruler, *lines[1:]))

    def csv(self) -> str:
        """Returns comma-separated values, a line per row."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.header, *([str(one) for one in row] for row in self.rows)])
        return out.getvalue()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        every = self._wanted()
        if is_endless(console):
            yield self._drawn(every, FILE_WIDTH, squeezed=False)
        elif self.chosen is not None or self.first_to_go is None:
            yield from (self._drawn(block, options.max_width) for block in self._blocks(every, options.max_width))
        else:
            kept = next(k for k in self._fewer(every) if len(k) < 3 or self._fits(k, options.max_width))
            yield self._drawn(kept, options.max_width)
            yield from self._hint([self.header[place] for place in every if place not in kept], console)

    def _hint(self, missing: list[str], console: Console) -> Iterator[Text]:
        """Yields the line on dropped columns; only once per console, as it may have many similar tables."""
        words = f"left out at {console.width} columns: {', '.join(missing)}"
        told = console.told if isinstance(console, Output) else set()
        if missing and self.hints and not is_quiet() and words not in told:
            told.add(words)
            yield Text(f"{words}; a wider terminal shows them, or --columns NAME,NAME or all", style="dim")

    def _wanted(self) -> Columns:
        """Returns the columns to show: all, or the first and the chosen ones, if this table has any."""
        mine = [self.header.index(name) for name in self.chosen or () if name in self.header]
        return tuple(dict.fromkeys([0, *mine])) if mine else tuple(range(len(self.header)))

    def _fewer(self, every: Columns) -> Iterator[Columns]:
        """Yields the columns, then one fewer each time, down to the first only."""
        named = [self.header.index(name) for name in self.first_to_go or () if name in self.header]
        rest = [place for place in reversed(every) if place not in named and place != 0]
        yield every
        for gone in range(1, len(every)):
            yield tuple(place for place in every if place not in [*named, *rest][:gone])

    def _blocks(self, every: Columns, width: int) -> Iterator[Columns]:
        """Yields the columns of each of the tables below one another."""
        block: Columns = (0,)
        for place in every[1:]:
            if len(block) > 1 and not self._fits((*block, place), width):
                yield block
                block = (0,)
            block = (*block, place)
        yield block

    def _fits(self, columns: Columns, width: int) -> bool:
        return sum(self._least(place, width) for place in columns) + _margins(len(columns), roomy=False) <= width

    def _natural(self, place: int) -> int:
        return max(_width(Text(self.header[place])), self._widest(place))

    def _widest(self, place: int) -> int:
        """Returns the characters of the widest cell."""
        return max((_width(row[place]) for row in self._cells), default=0)

    def _least(self, place: int, width: int) -> int:
        """Returns the characters that a column needs. The first column names the rows: it is wrapped only if it would
        take more than three fifths of the terminal.
        """
        cells = self._widest(place)
        if place in self.words and (place or cells > width * 3 // 5):
            longest = max((_longest_word(row[place].plain) for row in self._cells), default=0)
            cells = min(cells, max(FOLDED, min(longest, LONGEST_WORD)))
        return max(cells, _longest_word(self.header[place]))

    def _drawn(self, columns: Columns, width: int, squeezed: bool = True) -> Table:
        """Draws these columns. `squeezed`: margins and headings may be reduced."""
        natural = {place: self._natural(place) for place in columns}
        roomy = not squeezed or sum(natural.values()) + _margins(len(columns), roomy=True) <= width
        least = {
            place: self._least(place, width) if squeezed or place in self.words else natural[place] for place in columns
        }
        widths = _between(least, natural, width - _margins(len(columns), roomy))
        table = Table(box=SIMPLE_HEAD, padding=(0, 1) if roomy else (0, 1, 0, 0), show_edge=roomy, pad_edge=roomy)
        for place in columns:
            side: Literal["left", "right"] = "left" if place in self.words else "right"
            heading = Align(Text(self.header[place]), side, vertical="bottom")
            table.add_column(heading, justify=side, width=widths[place], overflow="fold")
        for row in self._cells:
            table.add_row(*(row[place] for place in columns))
        return table


def markdown_text(text: str) -> str:
    """Escapes a text for Markdown, on one line: it cannot become a table, link, image, mention, HTML or code."""
    line = escape_control(" ".join(text.split()))
    shown = re.sub(r"([\\`*\[\]|~#!])", r"\\\1", escape(line, quote=False))
    shown = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", shown)
    return shown.replace("@", "&#64;").replace("://", ":&#47;&#47;")


def _margins(count: int, roomy: bool) -> int:
    """Returns the number of characters between and around columns, as rich draws them."""
    return 3 * count + 1 if roomy else 2 * (count - 1)


def _between(least: dict[int, int], natural: dict[int, int], room: int) -> dict[int, int]:
    """Returns the width of each column: its minimum plus a share of the spare room, up to its natural width."""
    found, spare = dict(least), room - sum(least.values())
    wishes = sorted(least, key=lambda place: natural[place] - least[place])
    for number, place in enumerate(wishes):
        more = max(0, min(natural[place] - found[place], spare // (len(wishes) - number)))
        found[place], spare = found[place] + more, spare - more
    return found


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _width(text: Text) -> int:
    return max(map(cell_len, text.plain.split("\n")))
