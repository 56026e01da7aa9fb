"""A file that is written whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_aside(out: Path, text: str) -> None:
    """Writes `text` to `out`, beside it first."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(out)
