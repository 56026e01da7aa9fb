"""What a disk moves, as measured by `zerobench calibrate --disk`, and how much of it the engine's files reach.

    of_raw   = a second's bytes (via) / a second's bytes (raw)   the same blocks and depth, one right after the other
    of_bound = of updates, beside the slower of the disk and the update in memory: neither can be overtaken

A folder of a calibration holds `transfers.parquet` (a DiskRow each), `rates.parquet` (a DiskRate each) and
`provenance.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from .collectives import read_tables, write_tables

RAW, STORE, CHECKED = "raw", "store", "checked"
"""Plain preadv and pwritev in threads; the engine's files without checksums; with them."""

UPDATE, IN_MEMORY = "update", "in memory"
"""The engine's update over files with checksums; the same where nothing is in files."""

GIB = 2**30
RESAMPLES = 1000


@dataclass(frozen=True)
class DiskRow:
    """One repetition: `file_bytes` in blocks of `block_bytes`, `depth` at once."""

    via: str
    kind: str
    """"read", "write", or "mixed": every other block is read, the others are written."""
    block_bytes: int
    depth: int
    direct: bool
    """Past the page cache."""
    file_bytes: int
    moved_bytes: int
    """Read and written."""
    repetition: int
    seconds: float
    cpu_seconds: float
    """Of all threads of the process, the kernel's share included."""


@dataclass(frozen=True)
class DiskRate:
    """Medians over the repetitions, with 95 % intervals."""

    via: str
    kind: str
    block_bytes: int
    depth: int
    direct: bool
    bytes_per_s: float
    bytes_per_s_low: float
    bytes_per_s_high: float
    of_raw: float
    of_raw_low: float
    of_raw_high: float
    of_bound: float
    of_bound_low: float
    of_bound_high: float
    cpu_s_per_gib: float


@dataclass(frozen=True)
class DiskCalibration:
    """A disk's transfers: rows, rates, and where they come from."""

    transfers: pd.DataFrame
    rates: list[DiskRate]
    provenance: dict[str, Any]

    def rate(self, kind: str, block_bytes: int, depth: int, via: str = CHECKED) -> DiskRate:
        """What was reached. Raises KeyError with what there is."""
        for row in self.rates:
            if (row.via, row.kind, row.block_bytes, row.depth) == (via, kind, block_bytes, depth):
                return row
        there = ", ".join(f"{row.via} {row.kind} {row.block_bytes} × {row.depth}" for row in self.rates)
        raise KeyError(f"{via} {kind} {block_bytes} × {depth} is not calibrated; there is {there}")


def rates_of(transfers: pd.DataFrame) -> list[DiskRate]:
    """A rate for each way, kind, block size and depth."""
    keys = ["kind", "block_bytes", "depth", "direct", "file_bytes"]
    found = []
    for key, same in transfers.groupby(keys, sort=False):
        speeds = same.assign(speed=same["moved_bytes"] / same["seconds"])
        speed = speeds.pivot(index="repetition", columns="via", values="speed")
        slower = speed[[via for via in (RAW, IN_MEMORY) if via in speed]].min(axis="columns")
        cost = (same["cpu_seconds"] / same["moved_bytes"]).groupby(same["via"]).median()
        kind, block, depth, direct, _ = cast(tuple[str, int, int, bool, int], key)
        for via in (str(one) for one in same["via"].unique()):
            bound = slower if via in (UPDATE, IN_MEMORY) else speed[RAW]
            rate, of_raw, of_bound = (_median((speed[via] / of).to_numpy()) for of in (1.0, speed[RAW], bound))
            found.append(DiskRate(via, kind, block, depth, direct, *rate, *of_raw, *of_bound, float(cost[via] * GIB)))
    return found


def _median(values: np.ndarray) -> tuple[float, float, float]:
    """With the interval that resampling gives."""
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[drawn], axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def write_disk_calibration(folder: Path, transfers: Sequence[DiskRow], provenance: dict[str, Any]) -> DiskCalibration:
    """Finds the rates, and writes all to `folder`; an earlier calibration there is replaced."""
    frame = pd.DataFrame([asdict(row) for row in transfers])
    rates = rates_of(frame)
    write_tables(folder, frame, "rates", rates, provenance)
    return DiskCalibration(frame, rates, provenance)


def load_disk_calibration(folder: Path | str) -> DiskCalibration:
    """What `zerobench calibrate --disk` wrote. Raises FileNotFoundError where there is none."""
    none = "no calibration of a disk; zerobench calibrate --disk"
    return DiskCalibration(*read_tables(Path(folder), "rates", DiskRate, none))
