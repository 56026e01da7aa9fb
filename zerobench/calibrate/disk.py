"""The rates of a disk, as measured by `zerobench calibrate --disk`, and the fraction that the engine's files reach.

    of_raw   = bytes per second (via) / bytes per second (raw)   at the same blocks and depth, measured back to back
    of_bound = of updates, relative to the slower of the disk and the update in memory: an upper bound

A folder of a calibration holds `transfers.parquet` (one DiskRow each), `rates.parquet` (one DiskRate each) and
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
"""The engine's update over files with checksums; the same update in memory."""

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
    """True where the page cache is bypassed."""
    file_bytes: int
    moved_bytes: int
    """Bytes read and written."""
    repetition: int
    seconds: float
    cpu_seconds: float
    """CPU time of all threads of the process, including the kernel's."""


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
    """A disk's calibration: transfers, rates and provenance."""

    transfers: pd.DataFrame
    rates: list[DiskRate]
    provenance: dict[str, Any]

    def rate(self, kind: str, block_bytes: int, depth: int, via: str = CHECKED) -> DiskRate:
        """Returns the measured rate. Raises KeyError with the available ones."""
        for row in self.rates:
            if (row.via, row.kind, row.block_bytes, row.depth) == (via, kind, block_bytes, depth):
                return row
        there = ", ".join(f"{row.via} {row.kind} {row.block_bytes} × {row.depth}" for row in self.rates)
        raise KeyError(f"{via} {kind} {block_bytes} × {depth} is not calibrated; there is {there}")


def rates_of(transfers: pd.DataFrame) -> list[DiskRate]:
    """Computes a rate for each way, kind, block size and depth."""
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
    """Returns the median with its bootstrap interval."""
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[drawn], axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def write_disk_calibration(folder: Path, transfers: Sequence[DiskRow], provenance: dict[str, Any]) -> DiskCalibration:
    """Computes the rates and writes all to `folder`; replaces an earlier calibration there."""
    frame = pd.DataFrame([asdict(row) for row in transfers])
    rates = rates_of(frame)
    write_tables(folder, frame, "rates", rates, provenance)
    return DiskCalibration(frame, rates, provenance)


def load_disk_calibration(folder: Path | str) -> DiskCalibration:
    """Reads the result of `zerobench calibrate --disk`. Raises FileNotFoundError where there is none."""
    none = "no calibration of a disk; zerobench calibrate --disk"
    return DiskCalibration(*read_tables(Path(folder), "rates", DiskRate, none))
