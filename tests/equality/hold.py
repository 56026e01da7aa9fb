"""Holds cells against their executions, all of one world size in one launch.

attempt   a launch of a cell's real world: gloo's threads may keep a buffer of a peer a moment longer than its engine,
          and a machine that is busy elsewhere makes that moment long, so that a cell that differs is run again
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zerobench.config.cell import CellConfig

from .compare import Difference, compare
from .worlds import Records, run_fake, run_real

ATTEMPTS = 4


def hold(configs: Mapping[str, CellConfig], folder: Path, attempts: int = ATTEMPTS) -> list[Difference]:
    """Returns what differs between real ranks and their executions. `configs`: of one world size. Raises ValueError
    with the sentence of a cell that cannot be executed.
    """
    fake = run_fake(configs, folder / "executed")
    differences: dict[str, list[Difference]] = {}
    for attempt in range(attempts):
        left = {name: one for name, one in configs.items() if not _equal(differences.get(name))}
        if left:
            differences |= _differences(left, run_real(left, folder / f"attempt-{attempt}"), fake, differences)
    return [row for name in configs for row in differences[name]]


def _equal(rows: list[Difference] | None) -> bool:
    return bool(rows) and all(row.is_none for row in rows or [])


def _differences(
    configs: Mapping[str, CellConfig], real: Records, fake: Records, before: Mapping[str, list[Difference]]
) -> dict[str, list[Difference]]:
    """Returns the rows of each cell, or those of an earlier attempt where that differed less, rank by rank."""
    found = {}
    for name, config in configs.items():
        rows = []
        for place, rank in enumerate(fake[name]):
            theirs, ours = real[name][rank], fake[name][rank]
            if isinstance(theirs, str) or isinstance(ours, str):
                raise ValueError(
                    f"{name}, rank {rank} of {config.world_size}: {theirs if isinstance(theirs, str) else ours}"
                )
            row = compare(name, config.strategy.name, config.world_size, theirs, ours)
            earlier = before[name][place] if name in before else row
            rows.append(min(row, earlier, key=lambda one: (one.memory_rows + one.traffic_rows, one.real_peak_bytes)))
        found[name] = rows
    return found
