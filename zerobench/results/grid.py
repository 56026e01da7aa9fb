"""A table of text, rendered for a terminal, fitted to its width, and as Markdown; markup.html has its HTML.
Passages: headings with sentences and tables, in the same words on a terminal, in Markdown and on a page.

A column of *words* may be wrapped between words; a column of *figures* is shown whole or not at all. At its *natural*
width a table has each cell on one line. If the terminal is narrower:

    1. squeeze    margins are dropped, words and headings are wrapped
    2. leave out  columns are dropped, the least important first, and a line below the table names them; or
    2. continue   if no order of importance is given, or the columns were requested by name, the columns that do not fit
                  continue in another table below, after the first column again

A file has no width: it gets all columns, with words wrapped if that keeps lines within FILE_WIDTH.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
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

from ..host.terminal import FILE_WIDTH, Output, is_endless, is_quiet, print_on
from ..sizes import escape_control, printable

FOLDED = 20
"""Least width of a column of words, in characters, if its content is that wide."""

LONGEST_WORD = 32
"""Longest word, in characters, that a column is kept wide enough for; a longer one is broken."""

GridCell = str | Text
"""Text of a cell; a *marked* one is a Text with a style, bold where fonts are available."""


@dataclass(frozen=True, eq=False)
class GridColumn:
    """A column: its heading and cells. `names_rows`: it is the first one."""

    name: str
    cells: Sequence[Text]
    is_words: bool
    names_rows: bool

    @cached_property
    def widest(self) -> int:
        """Characters of the widest cell."""
        return max(map(_width, self.cells), default=0)

    @property
    def natural(self) -> int:
        """Characters with every cell and the heading on one line."""
        return max(_width(Text(self.name)), self.widest)

    def least(self, width: int) -> int:
        """Returns the characters that the column needs. The first one is wrapped only if it would take more than three
        fifths of the terminal.
        """
        cells = self.widest
        if self.is_words and not (self.names_rows and cells <= width * 3 // 5):
            longest = max((_longest_word(cell.plain) for cell in self.cells), default=0)
            cells = min(cells, max(FOLDED, min(longest, LONGEST_WORD)))
        return max(cells, _longest_word(self.name))


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
    def text_columns(self) -> frozenset[int]:
        """Indices of the columns of words."""
        if isinstance(self.left, int):
            return frozenset(range(self.left))
        return frozenset(index for index, name in enumerate(self.header) if name in self.left)

    def markdown(self, sides: bool = True, is_markdown: bool = False) -> str:
        """Returns a pipe table. `sides`: align columns of figures right. `is_markdown`: cells are Markdown already."""
        ruler = ["---" if index in self.text_columns or not sides else "--:" for index in range(len(self.header))]
        shown = (lambda text: text.replace("|", "\\|")) if is_markdown else markdown_text
        lines = [[shown(str(cell)) for cell in row] for row in (self.header, *self.rows)]
        return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], ruler, *lines[1:]))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns, width = self._wanted(), options.max_width
        if is_endless(console):
            yield _drawn(columns, FILE_WIDTH, squeezed=False)
        elif self.chosen is not None or self.first_to_go is None:
            block = columns[:1]
            for column in columns[1:]:
                if len(block) > 1 and not _fit([*block, column], width):
                    yield _drawn(block, width)
                    block = columns[:1]
                block = [*block, column]
            yield _drawn(block, width)
        else:
            named = [column for name in self.first_to_go for column in columns if column.name == name]
            leaving = [*named, *(column for column in reversed(columns[1:]) if column not in named)]
            kept = list(columns)
            while len(kept) > 2 and not _fit(kept, width):
                kept.remove(leaving.pop(0))
            yield _drawn(kept, width)
            missing = ", ".join(column.name for column in columns if column not in kept)
            note = f"left out at {console.width} columns: {missing}"
            printed = console.told if isinstance(console, Output) else set()
            if missing and self.hints and not is_quiet() and note not in printed:  # it may have many similar tables
                printed.add(note)
                yield Text(f"{note}; a wider terminal shows them, or --columns NAME,NAME or all", style="dim")

    def _wanted(self) -> list[GridColumn]:
        """Returns the columns to show: all, or the first and the chosen ones, if this table has any."""
        cells = [[cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row] for row in self.rows]
        columns = [
            GridColumn(name, [row[index] for row in cells], index in self.text_columns, index == 0)
            for index, name in enumerate(self.header)
        ]
        chosen = [columns[self.header.index(name)] for name in self.chosen or () if name in self.header]
        return list(dict.fromkeys([columns[0], *chosen])) if chosen else columns


def _fit(columns: Sequence[GridColumn], width: int) -> bool:
    return sum(column.least(width) for column in columns) + _margins(len(columns), roomy=False) <= width


def _drawn(columns: Sequence[GridColumn], width: int, squeezed: bool = True) -> Table:
    """Draws columns. `squeezed`: margins and headings may be reduced."""
    roomy = not squeezed or sum(column.natural for column in columns) + _margins(len(columns), roomy=True) <= width
    widths = {c: c.least(width) if squeezed or c.is_words else c.natural for c in columns}
    spare = width - _margins(len(columns), roomy) - sum(widths.values())
    # columns that need little more come first, so that the others share what these leave
    for number, column in enumerate(sorted(columns, key=lambda column: column.natural - widths[column])):
        more = max(0, min(column.natural - widths[column], spare // (len(columns) - number)))
        widths[column], spare = widths[column] + more, spare - more
    table = Table(box=SIMPLE_HEAD, padding=(0, 1) if roomy else (0, 1, 0, 0), show_edge=roomy, pad_edge=roomy)
    for column in columns:
        side: Literal["left", "right"] = "left" if column.is_words else "right"
        heading = Align(Text(column.name), side, vertical="bottom")
        table.add_column(heading, justify=side, width=widths[column], overflow="fold")
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
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


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _width(text: Text) -> int:
    return max(map(cell_len, text.plain.split("\n")))


@dataclass(frozen=True)
class Passage:
    """A heading with its sentences and tables."""

    title: str
    parts: list[str | Grid]

    def markdown(self) -> str:
        """Returns the passage as Markdown: sentences are a list."""
        lines = [f"## {markdown_text(printable(self.title))}", ""]
        for part in self.parts:
            if isinstance(part, Grid):
                lines += ["", part.markdown()]
            else:
                lines.append(f"- {markdown_text(printable(part))}")
        return "\n".join(lines) + "\n"


def print_passages(console: Console, passages: Iterable[Passage]) -> None:
    """Prints passages with an empty line between them; sentences are indented."""
    for number, passage in enumerate(passages):
        if number:
            console.print()
        print_on(console, passage.title, "bold")
        for part in passage.parts:
            if isinstance(part, Grid):
                console.print(part)
            else:
                print_on(console, f"  {part}")
