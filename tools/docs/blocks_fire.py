"""The block on sweeps under fire, from the records of `make fire` (see blocks.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tools.docs.blocks_systems import pipes

NONE_YET = "No sweep under fire is on record yet; `make fire` makes one."


def under_fire(root: Path) -> str:
    """Each recorded campaign: what was shot, and what differs from the undisturbed sweep."""
    records = sorted((root.parent.parent / "fire").glob("*/summary.json"))
    if not records:
        return NONE_YET
    head = [
        "campaign", "cells", "launches", "shots", "starts", "runs hit", "bad, not shot", "hung", "differences",
        "orphans", "duplicated", "lost", "left behind",
    ]  # fmt: skip
    lines = [pipes(head), "| --- |" + " --: |" * (len(head) - 1)]
    for path in records:
        record = json.loads(path.read_text())
        counts = record["counts"]
        name = f"[{record['kind']}, seed {record['seed']}](results/fire/{path.parent.name}/summary.md)"
        cells = f"{counts['cells']} of {counts['cells_of_all']}"
        after = [counts[key] for key in ("launches", "shots", "starts", "bad_runs", "bad_runs_not_shot", "hung")]
        left = [counts[key] for key in ("orphans", "duplicated", "lost", "leftovers")]
        lines.append(pipes([name, cells, *map(str, [*after, len(record["differences"]), *left])]))
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[Path], str]] = {"under_fire": under_fire}
