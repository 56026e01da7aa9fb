"""Blocks of the pages on published figures and on PyTorch's questions of memory, as recorded (see blocks.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.docs import questions


def published(root: Path) -> str:
    """The tables that `make published` wrote."""
    path = root.parent.parent / "published/published.md"
    return path.read_text().rstrip() if path.is_file() else "No table is on record yet; `make published` makes one."


BLOCKS: dict[str, Callable[[Path], str]] = {
    "published": published,
    **{block: lambda _root, block=block: questions.page(block) for block in questions.SECTIONS},  # type: ignore[misc]
}
