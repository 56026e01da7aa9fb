"""The digest of the code that figures depend on: the engine, the strategies and the instrument.

A table that README and the first pages show keeps it in a file, CODE, beside its runs. A test compares it with today's,
so that no such table is older than the engine it speaks of. Comments, docstrings and blank lines do not count. The file
is written by record.py.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "zerobench"
PARTS = ("zero", "strategies", "probes", "models", "worker.py", "data.py")
"""Files and folders of the package that run in a rank, or measure it."""

CODE = "engine.sha256"

PROMINENT = ("stages",)
"""Experiments whose tables are on the first two screens of README and of the first tutorial."""


@cache
def engine_code() -> str:
    """Returns the digest of today's code: 12 hex digits."""
    digest = hashlib.sha256()
    for part in PARTS:
        place = PACKAGE / part
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(f"{path.relative_to(PACKAGE)}\0{code_of(path.read_text())}\0".encode())
    return digest.hexdigest()[:12]


def code_of(text: str) -> str:
    """Returns a module's lines without docstrings, comments and blank lines."""
    told: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            told.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = (line.rstrip() for number, line in enumerate(text.splitlines(), 1) if number not in told)
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def recorded_by(folder: Path) -> str:
    """Returns the digest of the code that recorded the runs of a folder; empty if it does not say."""
    path = folder / CODE
    return path.read_text().strip() if path.is_file() else ""
