"""Blocks of the pages on published figures and on PyTorch's questions of memory, as recorded (see blocks.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from tools.docs import questions
from tools.docs.blocks_systems import pipes
from tools.docs.committed import load


def published(root: Path) -> str:
    """The tables that `make published` wrote."""
    path = root.parent.parent / "published/published.md"
    return path.read_text().rstrip() if path.is_file() else "No table is on record yet; `make published` makes one."


CATEGORIES = ("parameters", "gradients", "master", "optimizer", "communication")


def lora(root: Path) -> str:
    """Categories of states at their maxima, and the traffic, of each strategy on a frozen model with adapters."""
    lines = [
        f"| strategy | {' | '.join(CATEGORIES)} | states | predicted | moved |",
        f"| --- |{' --: |' * (len(CATEGORIES) + 3)}",
    ]
    runs = load(root.parent.parent / "lora").runs
    for run in runs.sort_values("started").itertuples():
        sizes = [*(getattr(run, f"max_{name}_bytes") for name in CATEGORIES), run.states_bytes]
        sizes += [run.predicted_states_bytes]
        name = run.strategy
        if json.loads(run.config)["strategy"].get("upcast_frozen") is False:
            name += ", upcast_frozen=false"
        shown = ["–" if pd.isna(size) else f"{size / 2**20:.2f} MiB" for size in sizes]
        lines.append(pipes([name, *shown, f"{run.volume_psi * run.psi / 1e6:.2f} M"]))
    first, said = runs.iloc[0], "moved: elements per step"
    setting = f"{first.model}, ψ = {first.psi:,}, N = {first.world_size}, {first.precision}, {first.optimizer}"
    return "\n".join(
        [*lines, "", f"{setting}; {said}. Recorded on {first.started[:10]} (commit `{first.commit[:7]}`)."]
    )


BLOCKS: dict[str, Callable[[Path], str]] = {
    "lora": lora,
    "published": published,
    **{block: lambda _root, block=block: questions.page(block) for block in questions.SECTIONS},
}
