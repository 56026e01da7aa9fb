"""The block on releases of torch, from committed runs of `make versions` (see blocks.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from tools.docs.blocks_systems import pipes
from tools.docs.committed import load
from validation.releases import MeasuredRelease, Release, rows_of

ALWAYS = ("peak_bytes", "states_bytes", "volume_psi")
"""Rows of the table beside those that have moved."""


def versions(root: Path) -> str:
    """A table per loop: what moved from release to release, and the whole."""
    folders = sorted((root.parent.parent / "versions" / root.name).glob("torch-*"), key=_order)
    if not folders:
        return "No release is on record yet; `make versions` measures them."
    found = [_release(folder) for folder in folders]
    first = next(iter(found[0].rows.values()))[0]
    parts = []
    for loop in found[0].rows:
        rows = rows_of(found, loop)
        moved = [row for row in rows if any("(" in cell for cell in row[1:])]
        shown = [row for row in rows if row in moved or row[0] in ALWAYS]
        lines = [pipes([loop, *(one.title for one in found)]), "| --- |" + " --: |" * len(found)]
        lines += [pipes([row[0], *(f"**{cell}**" if "(" in cell else cell for cell in row[1:])]) for row in shown]
        parts.append("\n".join([*lines, "", f"{len(moved)} of {len(rows)} figures moved."]))
    launches = min(len(rows) for one in found for rows in one.rows.values())
    source = f"N = {first['world_size']} on gloo, ψ = {first['psi']:,}, {launches} launches, {first['started'][:10]}."
    return "\n\n".join([*parts, source])


def _order(folder: Path) -> list[int]:
    return [int(part) for part in folder.name.removeprefix("torch-").split(".")]


def _release(folder: Path) -> MeasuredRelease:
    rows: dict[str, list[dict[str, Any]]] = {}
    for one in load(folder).runs.to_dict("records"):
        row = {str(name): None if pd.isna(value) else value for name, value in one.items()}
        rows.setdefault(str(row["model"]), []).append(row)
    return MeasuredRelease(Release(folder.name.replace("-", " "), Path("python")), rows)


BLOCKS: dict[str, Callable[[Path], str]] = {"versions": versions}
