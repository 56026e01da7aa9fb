"""Executed cells on disk, so that a comparison that was stopped goes on where it was.

A line per cell in a file: what it was executed as, by which code, and its sizes. Lines of other code are left alone and
not read; a line that was cut off by a crash is skipped.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from ....config.cell import CellConfig
from ....fake_execution import Execution, Target
from ....host.files import read_text
from ....results.provenance import source_of
from .judge import Sizes

FOLDER = Path("results/runs/published_runs")

FILE = "cells.jsonl"


class Store:
    """Sizes by cell and device. Raises ValueError, or OSError, with the file's name where it cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._known: dict[str, Sizes] = {}
        lines = read_text(self._path).splitlines() if self._path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
                self._known[entry["key"]] = Sizes(**entry["sizes"])
            except (ValueError, KeyError, TypeError, RecursionError):
                continue

    def find(self, config: CellConfig, target: Target) -> Sizes | None:
        """Returns the sizes of a cell that this code has executed; None where there are none."""
        return self._known.get(_key(config, target))

    def add(self, config: CellConfig, target: Target, found: Execution) -> None:
        """Keeps an execution. One that did not end by itself, for want of time or memory, is tried again next time."""
        sizes = sizes_of(found)
        self._known[_key(config, target)] = sizes
        if found.problem:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"key": _key(config, target), "sizes": asdict(sizes)}) + "\n")


def sizes_of(found: Execution) -> Sizes:
    """Returns the bytes of an execution."""
    if found.problem:
        return Sizes(problem=found.problem)
    allocated = found.allocated_bytes if found.allocated_bytes is not None else found.peak_bytes
    low, high = found.reserved_bytes or (allocated, allocated)
    return Sizes(allocated, low, high)


def _key(config: CellConfig, target: Target) -> str:
    code, release = source_of(config), torch.__version__
    return f"{config.cell_id} {target.kind} {target.attention or 'auto'} {code} {release}"
