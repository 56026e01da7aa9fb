"""The page: one HTML file with its style, its code and its data in it, which asks for nothing beside itself."""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files
from pathlib import Path

from ...sizes import show_bytes
from .pack import packed
from .worlds import EXECUTED, MEASURED, World, setting_words

LIMIT_BYTES = 3 * 2**20
SCRIPTS = ("model.js", "layout.js", "draw.js", "words.js", "stage.js", "scale.js", "page.js")
"""The page's code, in order."""


def write_page(to: Path, worlds: list[World]) -> int:
    """Writes the page and returns its size in bytes. Raises ValueError where it would exceed LIMIT_BYTES."""
    text = page_of(worlds)
    size = len(text.encode())
    if size > LIMIT_BYTES:
        words = "leave ranks or numbers of ranks out: --ranks 0, --worlds none"
        raise ValueError(f"--out {to}: the page would be {show_bytes(size)}, above {show_bytes(LIMIT_BYTES)}; {words}")
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(text, encoding="utf-8")
    return size


def page_of(worlds: list[World]) -> str:
    """Returns the page as text."""
    panels = worlds[0].panels
    parts = {
        "title": escape(f"One training step, recorded: {panels[0].row['model']}"),
        "setting": escape(setting_words(panels)),
        "style": part("step.css"),
        "script": "\n".join(part(name) for name in SCRIPTS),
        "data": packed(worlds, {"scale_words": _scale_words(worlds)}),
    }
    return re.sub(r"<!--(\w+)-->", lambda mark: parts[mark[1]], part("step.html"))


def _scale_words(worlds: list[World]) -> str:
    """Returns a sentence on which numbers were measured, and which executed."""
    by_how = {how: [f"{world.ranks:,}" for world in worlds if world.how == how] for how in (MEASURED, EXECUTED)}
    words = [f"Measured with real ranks: N = {', '.join(by_how[MEASURED])}." if by_how[MEASURED] else ""]
    if by_how[EXECUTED]:
        ns = ", ".join(by_how[EXECUTED])
        words.append(f"Executed on fake tensors, the fullest rank, each rank keeping its micro-batch: N = {ns}.")
    return " ".join(filter(None, words))


def part(name: str) -> str:
    """Returns a file of the page's."""
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")
