"""Blocks of the pages on what tiers cost in time, from the committed tables (see blocks.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from analysis.offload import name_of, parts_of
from tools.docs.blocks_systems import pipes
from tools.docs.committed import load
from validation.step_costs import ALONE, StepCost, ratios
from validation.store import read
from zerobench.results.summary import summarize


def offload_time(root: Path) -> str:
    """Step time by where the optimizer is, beside all on the device."""
    results = load(root / "offload_time")
    cells = summarize(results.runs)
    base = cells.sort_values("states_bytes").iloc[-1]
    lines = [
        "| | on the device | in host memory | in files | ms per step | over none |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for cell in cells.sort_values("states_bytes", ascending=False).itertuples():
        parts = parts_of(results, cell)
        sizes = (parts["device"], parts["host memory"], parts["files"])
        interval = f"({1000 * cell.step_s_low:.0f}–{1000 * cell.step_s_high:.0f})"
        shown = [
            f"`{name_of(cell.config)}`",
            *(f"{size:.2f}" for size in sizes),
            f"{1000 * cell.step_s:.0f} {interval}",
        ]
        lines.append(pipes([*shown, f"{cell.step_s / base.step_s:.2f}"]))
    return "\n".join(lines)


def step_costs(root: Path) -> str:
    """CPU time of a step by kind of work, of each strategy and lever (`make step-costs`)."""
    kinds = ("forward", "backward", "update", "copies", "transfers", "sums", "optimizer", "checks", "engine", "backend")
    return _costs(root, f"{root.name}.csv", ("cpu", *kinds, "waiting"))


def step_costs_link(root: Path) -> str:
    """A step whose ranks are joined by a link (`make step-costs`)."""
    return _costs(root, "link.csv", ("cpu", "backend", "waiting"))


def _costs(root: Path, name: str, columns: Sequence[str]) -> str:
    rows = read(root.parent.parent / "step_costs" / name, StepCost)
    names = list(dict.fromkeys(row.strategy for row in rows))
    base = next(name for name in names if name != ALONE)
    head = ["", f"step / {base}", "lowest to highest", "step, ms", *columns]
    lines = [pipes(head), "| --- |" + " --: |" * (len(head) - 1)]
    for name in names:
        mine, found = [row for row in rows if row.strategy == name], ratios(rows, name, base)
        shown = [f"{median(found):.3f}", f"{min(found):.3f}–{max(found):.3f}", f"{median(r.wall for r in mine):.0f}"]
        lines.append(pipes([f"`{name}`", *shown, *(f"{median(getattr(r, c) for r in mine):.1f}" for c in columns)]))
    one, rounds = rows[0], max(row.launch for row in rows) + 1
    link = f"{one.link:g} Gbit/s; " if one.link else ""
    words = f"({link}{rounds} rounds; {one.processor}, torch {one.torch}, code `{one.commit[:7]}`.)"
    return "\n".join([*lines, "", words])
