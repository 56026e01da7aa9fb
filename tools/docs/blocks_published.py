"""Blocks of the pages on published figures and on PyTorch's questions of memory, as recorded (see blocks.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.docs import questions


def published(root: Path) -> str:
    """The tables that `make published` wrote."""
    path = root.parent.parent / "published/published.md"
    return path.read_text().rstrip() if path.is_file() else "No table is on record yet; `make published` makes one."


def memory_questions(root: Path) -> str:
    """The questions, with the output of each command."""
    return questions.page()


BLOCKS: dict[str, Callable[[Path], str]] = {"published": published, "memory_questions": memory_questions}
