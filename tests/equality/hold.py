"""Holds cells against one another, in launches of some at a time.

attempt   a launch of a cell's real world: gloo's threads may keep a buffer of a peer a moment longer than its engine,
          and a machine that is busy elsewhere makes that moment long, so that a cell that differs is run again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from zerobench.config.cell import CellConfig

from .compare import Difference, compare
from .worlds import Records, run_fake, run_real

AT_ONCE = 12
"""Cells in one launch."""

ATTEMPTS = 4

Heard = Callable[[int], None]


def hold(
    configs: Mapping[str, CellConfig], folder: Path, heard: Heard = lambda cells: None, attempts: int = ATTEMPTS
) -> list[Difference]:
    """Returns what differs between real ranks and their executions. `configs`: of one world size. `heard`: is told how
    many cells more are done. Raises ValueError with the sentence of a cell that cannot be executed.
    """
    found: list[Difference] = []
    for number, begin in enumerate(range(0, len(configs), AT_ONCE)):
        names = list(configs)[begin : begin + AT_ONCE]
        chosen = {name: configs[name] for name in names}
        fake = run_fake(chosen, folder / f"{number}")
        differences: dict[str, list[Difference]] = {}
        for attempt in range(attempts):
            left = {name: one for name, one in chosen.items() if not _equal(differences.get(name))}
            if left:
                differences |= _differences(left, run_real(left, folder / f"{number}-{attempt}"), fake, differences)
        found += [row for name in names for row in differences[name]]
        heard(len(names))
    return found


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
