"""Collectives of a series over a link between two nodes: seconds of each, over its bytes at the link's rate.

Half of the ranks are on each node. A series has no barriers between its collectives, as exposed collectives of a step
follow one another. What zerobench/timing/costs.py knows of a link (TCP, OVER_RATE) is measured here. Needs root's
rights (link.py).

    python -m validation link-rates
    python -m validation link-rates --link 1 --ranks 2 --out /tmp/rates.csv
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from zerobench.calibrate.collectives import TRANSFERS, evenly
from zerobench.host.environment import rank_environment
from zerobench.host.terminal import stdout_console
from zerobench.launch.start_ranks import launch
from zerobench.results.grid import Grid
from zerobench.timing.costs import TCP, crossing
from zerobench.timing.hardware import GBIT_S
from zerobench.zero.comm.hierarchical import connect

from .link import run_on_nodes
from .store import read, write

OUT = Path("results/predicted_here/link_rates.csv")
RATES = (0.1, 1.0)
RANKS = (2, 4)
BYTES = tuple(2**20 * size for size in (2, 4, 8, 16))
MEASURED = (("torch", "all_gather"), ("torch", "reduce_scatter"), ("seam", "all_gather"), ("seam", "reduce_scatter"))
SERIES = 10
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class LinkRow:
    """One collective of a series. `bytes`: of the full tensor; `seconds`: the mean of the series; `over_rate`: seconds
    over those of the bytes that must cross the link, at its rate without headers (TCP).
    """

    link_gbit_s: float
    ranks: int
    via: str
    collective: str
    bytes: int
    seconds: float
    over_rate: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    words = "may be repeated (default: "
    parser.add_argument(
        "--link", type=float, action="append", metavar="GBIT", help=f"{words}{RATES[0]:g}, {RATES[1]:g})"
    )
    parser.add_argument("--ranks", type=int, action="append", metavar="N", help=f"{words}{RANKS[0]}, {RANKS[1]})")
    parser.add_argument("--out", type=Path, default=OUT, metavar="CSV", help="default: %(default)s")


def run(chosen: argparse.Namespace) -> int:
    """Measures, writes a row per series, and prints them."""
    rates, counts = chosen.link or RATES, chosen.ranks or RANKS
    if min(rates) <= 0 or min(counts) < 2 or any(ranks % 2 for ranks in counts):
        raise ValueError(f"--ranks {counts}, --link {rates}: even numbers from 2 on; rates above 0")
    rows: list[LinkRow] = []
    for gbit_s in rates:
        for ranks in counts:
            with tempfile.TemporaryDirectory() as folder:
                words = [sys.executable, "-m", "validation.link_rates", str(gbit_s), str(ranks), folder]
                run_on_nodes(words, gbit_s, TIMEOUT_S)
                rows += read(Path(folder) / "rows.csv", LinkRow)
    write(chosen.out, LinkRow, rows)
    lines = [
        [f"{row.link_gbit_s:g}", str(row.ranks), row.via, row.collective, f"{row.bytes / 2**20:g} MiB",
         f"{1000 * row.seconds:.0f} ms", f"{row.over_rate:.2f}"]
        for row in rows
    ]  # fmt: skip
    stdout_console().print(Grid(["Gbit/s", "N", "via", "collective", "tensor", "mean", "over the rate"], lines, left=0))
    return 0


@dataclass(frozen=True)
class SeriesJob:
    """The work of one rank."""

    rank: int
    ranks: int
    rendezvous: str
    gbit_s: float


def measure(job: SeriesJob, tell: object) -> list[LinkRow]:
    """Returns the rows of this rank."""
    rows = []
    with rank_environment(job.rank, job.ranks, "cpu", "gloo", job.rendezvous, 1, TIMEOUT_S) as device, torch.no_grad():
        comm = connect(None, device)
        for size in (evenly(size, job.ranks) for size in BYTES):
            full = torch.zeros(size // 4, device=device)
            for via, collective in MEASURED:
                transfer = TRANSFERS[via, collective]
                transfer(comm, full)
                dist.barrier()
                begun = time.perf_counter()
                for _ in range(SERIES):
                    transfer(comm, full)
                seconds = (time.perf_counter() - begun) / SERIES
                sent = size * (job.ranks - 1) / job.ranks
                at_rate = crossing(via, collective, sent, job.ranks) / (job.gbit_s * GBIT_S * TCP)
                row = LinkRow(
                    job.gbit_s, job.ranks, via, collective, size, round(seconds, 6), round(seconds / at_rate, 3)
                )
                rows.append(row)
    return rows


def _node(gbit_s: str, ranks: str, folder: str, node: str) -> None:
    """One node of two: half of the ranks. The first leaves the rows of rank 0 in a file of the folder."""
    half = int(ranks) // 2
    mine = range(int(node) * half, (int(node) + 1) * half)
    jobs = [SeriesJob(rank, int(ranks), f"{folder}/rendezvous", float(gbit_s)) for rank in mine]
    outcome = launch(measure, jobs, Path(folder) / f"logs-{node}", TIMEOUT_S, first=mine[0])
    if outcome.status != "ok":
        raise ValueError(f"{outcome.status}: {outcome.reason}")
    if node == "0":
        write(Path(folder) / "rows.csv", LinkRow, outcome.results[0])


if __name__ == "__main__":
    _node(*sys.argv[1:])
