"""Output without a format: *passages*, which a terminal, Markdown and a page all show in the same words.

A passage is a heading with its *parts*: sentences and grids. A *grid* is a table of text.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from ..host.terminal import print_on
from ..results.grid import Grid

Part = str | Grid


@dataclass(frozen=True)
class Passage:
    """A heading with its sentences and tables."""

    title: str
    parts: list[Part]


def print_parts(console: Console, parts: list[Part]) -> None:
    """Prints sentences, indented, and tables."""
    for part in parts:
        if isinstance(part, Grid):
            console.print(part)
        else:
            print_on(console, f"  {part}")
