"""Passages: headings with sentences and tables, in the same words on a terminal, in Markdown and on a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console

from ..host.terminal import print_on
from ..results.grid import Grid, markdown_text
from ..sizes import printable

Part = str | Grid


@dataclass(frozen=True)
class Passage:
    """A heading with its sentences and tables."""

    title: str
    parts: list[Part]

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
