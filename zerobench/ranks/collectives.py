"""The cost of a collective by its size, as measured by `zerobench calibrate`, and the line through it.

    seconds(collective, bytes) = latency_s + bytes / bytes_per_s            bytes: of the full tensor

A folder of a calibration holds `transfers.parquet` (one TransferRow each), `fits.parquet` (one FitRow each) and
`provenance.json`. A rank measures every collective at every size, interleaved, so that a drift of the machine affects
all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from ..host.environment import Rendezvous, rank_environment
from ..host.files import read_text
from ..zero.comm.backends import gather_into, scatter_into
from ..zero.comm.base import Comm
from ..zero.comm.hierarchical import connect

if TYPE_CHECKING:  # imported when a table is read or written
    import pandas as pd

RESAMPLES = 200


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
    """Fits a line for each collective. Raises ValueError if there are fewer than two sizes."""
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
    from scipy.optimize import nnls

    (latency, per_byte), _ = nnls(np.stack([1 / seconds, sizes / seconds], axis=1), np.ones(len(sizes)))
    return latency, max(per_byte, 1e-15)


def write_calibration(folder: Path, transfers: Sequence[TransferRow], provenance: dict[str, Any]) -> Calibration:
    """Fits, and writes all to `folder`; replaces an earlier calibration there."""
    import pandas as pd

    frame = pd.DataFrame([asdict(row) for row in transfers])
    fits = fit_all(frame)
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in (("transfers", frame), ("fits", pd.DataFrame([asdict(row) for row in fits]))):
        partial = folder / f"{name}.parquet.partial"  # readers see the old table or the whole new one
        table.to_parquet(partial, index=False)
        partial.replace(folder / f"{name}.parquet")
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")
    return Calibration(frame, fits, provenance)


def load_calibration(folder: Path | str) -> Calibration:
    """Reads the result of `zerobench calibrate`. Raises FileNotFoundError if there is none, ValueError if it is
    damaged.
    """
    import pandas as pd

    folder = Path(folder)
    if not (folder / "fits.parquet").is_file():
        raise FileNotFoundError(f"{folder}: no calibration; zerobench calibrate --out {folder} makes one")
    try:
        table = pd.read_parquet(folder / "fits.parquet")
        fits = [FitRow(**dict(zip(table.columns, row, strict=True))) for row in table.itertuples(index=False)]
        provenance = dict(json.loads(read_text(folder / "provenance.json")))
        return Calibration(pd.read_parquet(folder / "transfers.parquet"), fits, provenance)
    except Exception as error:  # a parser may raise anything for bytes of another format
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder}: its calibration is damaged: {reason}; measure it again") from error


# -- one rank --------------------------------------------------------------------------------------


ALIGN_BYTES = 64
WARMUP = 2
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class CalibrationJob:
    """The work of one rank. `sizes`: bytes of the full tensor, rounded up so that its slices are equal."""

    rank: int
    world_size: int
    device: str
    rendezvous: Rendezvous
    dtype: str
    sizes: tuple[int, ...]
    repetitions: int
    timeout_s: float


def own_slice(full: torch.Tensor) -> torch.Tensor:
    """Returns this rank's slice of a full tensor."""
    return full.chunk(dist.get_world_size())[dist.get_rank()]


TRANSFERS: dict[tuple[str, str], Callable[[Comm, torch.Tensor], Any]] = {
    ("seam", "reduce_scatter"): lambda comm, full: comm.reduce_scatter(full).wait(),
    ("seam", "all_gather"): lambda comm, full: comm.all_gather(full).wait(),
    ("seam", "all_reduce"): lambda comm, full: comm.all_reduce(full).wait(),
    ("seam", "broadcast"): lambda comm, full: comm.broadcast(full),
    ("torch", "reduce_scatter"): lambda comm, full: scatter_into(own_slice(full), full),
    ("torch", "all_gather"): lambda comm, full: gather_into(full, own_slice(full)),
    ("torch", "all_reduce"): lambda comm, full: dist.all_reduce(full),
    ("memory", "copy"): lambda comm, full: full[: full.numel() // 2].copy_(full[full.numel() // 2 :]),
}
"""(via, collective) -> the transfer of a full tensor. A copy reads one half and writes the other."""


def evenly(size: int, world_size: int) -> int:
    """Rounds `size` bytes up to whole, aligned slices."""
    step = ALIGN_BYTES * world_size * 2
    return -(-size // step) * step


def calibrate_rank(job: CalibrationJob, report: Callable[[int], None]) -> list[dict[str, Any]]:
    """Returns this rank's times: via, collective, bytes, repetition, seconds. `report` receives the number of finished
    rounds.
    """
    rows, backend = [], BACKENDS[job.device]
    environment = rank_environment(job.rank, job.world_size, job.device, backend, job.rendezvous, 1, job.timeout_s)
    with environment as device, torch.no_grad():
        comm = connect(None, device)
        dtype = getattr(torch, job.dtype)
        for repetition in range(-WARMUP, job.repetitions):
            for size in job.sizes:
                full = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
                for (via, collective), transfer in TRANSFERS.items():
                    seconds = _time(transfer, comm, full)
                    if repetition >= 0:
                        row = {"via": via, "collective": collective, "bytes": size}
                        rows.append(row | {"repetition": repetition, "seconds": seconds})
            if job.rank == 0:
                report(repetition + WARMUP + 1)
    return rows


def _time(transfer: Callable[[Comm, torch.Tensor], Any], comm: Comm, full: torch.Tensor) -> float:
    """Returns the time from when all ranks are ready until this one is done."""
    full.zero_()
    if comm.size > 1:
        dist.barrier()
    _finish(full)
    begun = time.perf_counter()
    transfer(comm, full)
    _finish(full)
    return time.perf_counter() - begun


def _finish(full: torch.Tensor) -> None:
    if full.is_cuda:
        torch.cuda.synchronize(full.device)
