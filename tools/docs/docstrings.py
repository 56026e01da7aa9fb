"""Makes lists of docstrings for the Python API: mkdocstrings reads docstrings as Markdown, ours are for a terminal.

A line that begins with a name in backticks and two spaces or more begins an item; indented lines continue it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ITEM = re.compile(r"^(`[^`]+`(?:, `[^`]+`)*) {2,}(\S.*)$")


def listed(text: str) -> str:
    """A docstring with its aligned lists as lists of Markdown."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if found := ITEM.match(line):
            lines += [""] * (not inside) + [f"- {found[1]}: {found[2]}"]
            inside = True
        elif inside and line.startswith("  "):
            lines[-1] += f" {line.strip()}"
        else:
            lines += [""] * (inside and bool(line)) + [line]
            inside = False
    return "\n".join(lines)


class Lists(griffe.Extension):
    """An extension of griffe, which mkdocs.yml names."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object once it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)
