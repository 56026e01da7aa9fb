"""The cost of a collective by its size, as measured by `zerobench calibrate`, and the line that a cost model uses.

    seconds(collective, bytes) = latency_s + bytes / bytes_per_s            bytes: of the full tensor

A folder of a calibration holds `transfers.parquet` (one TransferRow each), `fits.parquet` (one FitRow each) and
`provenance.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from ..host.files import read_text

RESAMPLES = 200
Row = TypeVar("Row")


@dataclass(frozen=True)
class TransferRow:
    """One repetition: the slowest rank's time for a collective over a full tensor of `bytes`."""

    via: str
    """"seam": the engine's own; "torch": torch's; "memory": a copy within a rank."""
    collective: str
    world_size: int
    dtype: str
    bytes: int
    repetition: int
    seconds: float


@dataclass(frozen=True)
class FitRow:
    """The line through the medians of a collective, by least squares of relative errors, with 95 % intervals."""

    via: str
    collective: str
    world_size: int
    dtype: str
    latency_s: float
    latency_s_low: float
    latency_s_high: float
    bytes_per_s: float
    bytes_per_s_low: float
    bytes_per_s_high: float
    largest_error: float
    """Largest relative deviation of a median from the line, a measure of its validity."""

    def seconds(self, size: int) -> float:
        """Returns the line's time for a full tensor of `size` bytes."""
        return self.latency_s + size / self.bytes_per_s


KEY = ("via", "collective", "world_size", "dtype")


@dataclass(frozen=True)
class Calibration:
    """A machine's calibration: transfers, fits and provenance."""

    transfers: pd.DataFrame
    fits: list[FitRow]
    provenance: dict[str, Any]

    def fit(self, collective: str, world_size: int, via: str = "seam") -> FitRow:
        """Returns the line of a collective. Raises KeyError with the available ones."""
        for row in self.fits:
            if (row.via, row.collective, row.world_size) == (via, collective, world_size):
                return row
        there = ", ".join(f"{row.via} {row.collective} N={row.world_size}" for row in self.fits)
        raise KeyError(f"{via} {collective} N={world_size} is not calibrated; there is {there}")


def fit_all(transfers: pd.DataFrame) -> list[FitRow]:
    """Fits a line for each collective. Raises ValueError where there are fewer than two sizes."""
    if transfers["bytes"].nunique() < 2:
        raise ValueError("a line needs two sizes at least")
    return [_fit(key, rows) for key, rows in transfers.groupby(list(KEY), sort=False)]


def _fit(key: Any, rows: pd.DataFrame) -> FitRow:
    table = rows.pivot(index="repetition", columns="bytes", values="seconds")
    sizes, times = table.columns.to_numpy(float), table.to_numpy()
    latency, per_byte = _line(sizes, np.median(times, axis=0))
    draw = np.random.default_rng(0)
    again = [np.median(times[draw.integers(len(times), size=len(times))], axis=0) for _ in range(RESAMPLES)]
    latencies, per_bytes = np.array([_line(sizes, medians) for medians in again]).T
    errors = np.abs((latency + per_byte * sizes) / np.median(times, axis=0) - 1)
    low, high = np.quantile(latencies, [0.025, 0.975])
    slow, fast = np.quantile(1 / per_bytes, [0.025, 0.975])
    numbers = (latency, low, high, 1 / per_byte, slow, fast, errors.max())
    return FitRow(*key, *(float(number) for number in numbers))


def _line(sizes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Returns (latency, seconds per byte), neither negative, with the least relative error."""
    found, _ = nnls(np.stack([1 / seconds, sizes / seconds], axis=1), np.ones(len(sizes)))
    return found[0], max(found[1], 1e-15)


def write_calibration(folder: Path, transfers: Sequence[TransferRow], provenance: dict[str, Any]) -> Calibration:
    """Fits, and writes all to `folder`; replaces an earlier calibration there."""
    frame = pd.DataFrame([asdict(row) for row in transfers])
    fits = fit_all(frame)
    write_tables(folder, frame, "fits", fits, provenance)
    return Calibration(frame, fits, provenance)


def load_calibration(folder: Path | str) -> Calibration:
    """Reads the result of `zerobench calibrate`. Raises FileNotFoundError where there is none."""
    return Calibration(*read_tables(Path(folder), "fits", FitRow, "no calibration; zerobench calibrate"))


def write_tables(
    folder: Path, transfers: pd.DataFrame, name: str, found: Sequence[Any], provenance: dict[str, Any]
) -> None:
    """Writes a calibration's transfers, its results `found` (dataclasses of one type) as table `name`, and its
    provenance.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for called, table in (("transfers", transfers), (name, pd.DataFrame([asdict(row) for row in found]))):
        aside = folder / f"{called}.parquet.partial"
        table.to_parquet(aside, index=False)
        aside.replace(folder / f"{called}.parquet")
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")


def read_tables(
    folder: Path, name: str, kind: Callable[..., Row], none: str
) -> tuple[pd.DataFrame, list[Row], dict[str, Any]]:
    """Reads the files of `write_tables`. Raises FileNotFoundError, a sentence with `none`, where there are none, and
    ValueError where one is damaged.
    """
    if not (folder / f"{name}.parquet").is_file():
        raise FileNotFoundError(f"{folder}: {none} --out {folder} makes one")
    try:
        table = pd.read_parquet(folder / f"{name}.parquet")
        found = [kind(**dict(zip(table.columns, row, strict=True))) for row in table.itertuples(index=False)]
        provenance = dict(json.loads(read_text(folder / "provenance.json")))
        return pd.read_parquet(folder / "transfers.parquet"), found, provenance
    except Exception as error:  # a parser may raise anything for bytes of another format
        words = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder}: its calibration is damaged: {words}; measure it again") from error
