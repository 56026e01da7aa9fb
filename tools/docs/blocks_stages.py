"""Blocks of the explanations: where each strategy's bytes are and what it sends, from the committed tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from tools.docs.blocks_systems import pipes
from tools.docs.committed import load
from zerobench.results.selection import latest
from zerobench.results.summary import summarize
from zerobench.results.tables import Results

STATES = ("parameters", "gradients", "optimizer", "communication")
PARTS = ("all_reduce", "reduce_scatter", "all_gather", "other")

FORMULAS = {
    "ddp": "4ψ + 4ψ + 8ψ",
    "zero1": "4ψ + 4ψ + 8ψ/N",
    "zero2": "4ψ + 4ψ/N + 8ψ/N",
    "zero3": "4ψ/N + 4ψ/N + 8ψ/N",
}
"""The paper's states in fp32 under Adam: parameters, gradients, optimizer states, in bytes."""


def name_of(cell: Any) -> str:
    """The strategy as a sweep names it, `fsdp2_tuned` for a tuned peer."""
    tuned = json.loads(cell.config)["strategy"].get("tuned")
    return f"{cell.strategy}_tuned" if tuned else str(cell.strategy)


def stage_bytes(root: Path) -> str:
    """Bytes per parameter of each category at its own maximum, beside the paper's formula and the prediction."""
    lines = [
        "| strategy | the paper, bytes | parameters | gradients | optimizer | in flight | states | predicted |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for cell in summarize(load(root / "stages").runs).itertuples():
        sizes = [getattr(cell, f"max_{category}_bytes") for category in STATES]
        sizes += [cell.states_bytes, cell.predicted_states_bytes]
        lines.append(
            pipes([f"`{cell.strategy}`", FORMULAS[cell.strategy], *(f"{size / cell.psi:.2f}" for size in sizes)])
        )
    return "\n".join([*lines, "", _setting(cell)])


def stage_traffic(root: Path) -> str:
    """Traffic of a step of each stage: phase, collective, elements."""
    return _traffic(load(root / "stages"))


def peer_bytes(root: Path) -> str:
    """States of the peers and ours by category, and the peak, in bytes per parameter."""
    lines = [
        "| strategy | parameters | gradients | optimizer | in flight | states | peak | peak of the allocator |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for cell in summarize(_compared(root).runs).itertuples():
        sizes = [getattr(cell, f"max_{category}_bytes") for category in STATES]
        sizes += [cell.states_bytes, cell.peak_bytes, cell.allocator_peak_bytes]
        lines.append(pipes([f"`{name_of(cell)}`", *(f"{size / cell.psi:.2f}" for size in sizes)]))
    return "\n".join([*lines, "", _setting(cell)])


def peer_volume(root: Path) -> str:
    """Traffic of a step of the peers and ours: the volume by collective, a ring's bytes, those that were sent."""
    lines = [
        "| strategy | all-reduce | reduce-scatter | all-gather | other | volume ψ | a ring sends | sent | step ms |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for cell in summarize(_compared(root).runs).itertuples():
        parts = [getattr(cell, f"volume_{part}_psi") for part in PARTS]
        sent = (cell.wire_bytes / cell.psi, cell.loopback_bytes / cell.psi)
        numbers = [*(f"{part:.2f}" for part in (*parts, cell.volume_psi)), *(f"{size:.2f}" for size in sent)]
        lines.append(pipes([f"`{name_of(cell)}`", *numbers, f"{cell.step_s * 1000:.0f}"]))
    return "\n".join([*lines, "", f"{_setting(cell)} *a ring sends*, *sent*: bytes per parameter and rank."])


def _compared(root: Path) -> Results:
    return load(root.parent.parent / "compare" / root.name / "compare")


def _traffic(results: Results) -> str:
    lines = [
        "| strategy | phase | operator | calls | elements / ψ | makes up |",
        "| --- | --- | --- | --: | --: | --- |",
    ]
    for run in latest(results.runs).drop_duplicates("cell_id").itertuples():
        rows = results.traffic[(results.traffic["run_id"] == run.run_id) & (results.traffic["rank"] == 0)]
        rows = rows[(rows["step"] == rows["step"].max()) & ~rows["control"]]
        lines += [pipes([f"`{name_of(run)}`", *cells]) for cells in _operators(rows, run.psi)]
    return "\n".join(lines)


def _operators(rows: pd.DataFrame, psi: int) -> Iterable[list[str]]:
    for (phase, operator, collective), mine in rows.groupby(["phase", "operator", "collective"], sort=True):
        volume = mine["volume_elements"].sum() / psi
        kind = collective or mine["kind"].iloc[0]
        makes = f"{str(kind).replace('_', '-')}, {volume:.2f} ψ"
        yield [str(phase), f"`{operator}`", f"{mine['calls'].sum():.0f}", f"{mine['elements'].sum() / psi:.2f}", makes]


def _setting(cell: Any) -> str:
    size = f"batch {cell.batch} × {cell.sequence}"
    return f"{cell.model}, ψ = {cell.psi / 1e6:.1f} M, N = {cell.world_size}, {size}, {cell.precision}, {cell.device}."


BLOCKS = {
    "stage_bytes": stage_bytes,
    "stage_traffic": stage_traffic,
    "peer_bytes": peer_bytes,
    "peer_volume": peer_volume,
}
"""Block -> what makes it."""
