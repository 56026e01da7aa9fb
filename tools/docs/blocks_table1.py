"""The blocks on the ZeRO paper's table 1, from committed rows of `make table1` (see blocks.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from tools.docs.blocks_systems import pipes
from validation.table1 import CELLS, GB, IN_FLIGHT, RANKS, SIZES, STAGES

LINES = 8
"""Lines of code that the block on bytes in flight lists."""


def table1(root: Path) -> str:
    """Printed and simulated gigabytes of all 54 cells, a row for each size and number of ranks."""
    cells = _read(root, CELLS)
    head = "".join(f" {name}: paper | simulated | × |" for name in STAGES.values())
    lines = [f"| size | N |{head}", "| --- | --: |" + " --: | --: | --: |" * len(STAGES)]
    mine = {(one.size, one.ranks, one.strategy): one for one in cells[cells["variant"] == ""].itertuples()}
    shown = 0
    for size in SIZES:
        for ranks in RANKS:
            row = [size, str(ranks)]
            for stage in STAGES:
                one = mine.get((size, ranks, stage))
                shown += one is not None
                row += _three(one) if one is not None else ["–", "–", "–"]
            lines.append(pipes(row))
    count = f"{shown} of {len(SIZES) * len(RANKS) * len(STAGES)} cells, GB."
    psi = {one.size: f"{one.size}: ψ = {one.psi:,}" for one in cells.itertuples()}
    return "\n".join([*lines, "", f"{count} {'; '.join(psi.values())}."])


def _three(one: Any) -> list[str]:
    printed = one.printed_gb + "*" * (one.how_printed == "cut off")
    return [printed, _gigabytes(one.executed_bytes), f"{one.executed_bytes / one.formula_bytes:.2f}"]


def in_flight(root: Path) -> str:
    """The cell with most bytes in flight: by variant, and by line of code."""
    cells, parts = _read(root, CELLS), _read(root, IN_FLIGHT)
    most = cells["ranks"].max()
    mine = cells[(cells["size"] == "7.5B") & (cells["ranks"] == most) & cells["strategy"].isin(["zero2", "zero3"])]
    lines = [
        "| stage | options | formula GB | simulated | × | parameters | gradients | communication |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for one in mine.itertuples():
        beyond = (
            one.parameters_bytes - one.parameters_formula_bytes, one.gradients_bytes - one.gradients_formula_bytes,
            one.communication_bytes,
        )  # fmt: skip
        sizes = [_gigabytes(one.formula_bytes), _gigabytes(one.executed_bytes)]
        times = f"{one.executed_bytes / one.formula_bytes:.1f}"
        named = [STAGES[one.strategy], one.variant or "by default"]
        lines.append(pipes([*named, *sizes, times, *(f"+{_gigabytes(size)}" for size in beyond)]))
    whole = parts[(parts["size"] == "7.5B") & (parts["ranks"] == most) & (parts["strategy"] == "zero3")]
    lines += ["", "The states of P_os+g+p by default, at the instant when their sum is largest:", ""]
    lines += ["| category | bytes | storages | largest | made by |", "| --- | --: | --: | --- | --- |"]
    for one in whole[whole["variant"] == ""].sort_values("bytes", ascending=False).head(LINES).itertuples():
        lines.append(pipes([one.category, f"{one.bytes:,}", str(one.storages), f"`{one.name}`", f"`{one.source}`"]))
    return "\n".join(lines)


def _read(root: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(root.parent.parent / "table1" / name, keep_default_na=False, dtype={"printed_gb": str})


def _gigabytes(size: float) -> str:
    gigabytes = size / GB
    return f"{gigabytes:,.0f}" if gigabytes >= 1000 else f"{gigabytes:.1f}" if gigabytes >= 100 else f"{gigabytes:.2f}"


BLOCKS: dict[str, Callable[[Path], str]] = {"table1": table1, "table1_in_flight": in_flight}
