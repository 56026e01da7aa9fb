"""`zerobench calibrate`: the cost of each collective by its size, the engine's beside torch's and a copy in memory.

With `--disk` a disk is measured instead (calibrate/disk.py).
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.progress import Progress, TextColumn, TimeElapsedColumn

from ...calibrate.collectives import Calibration, TransferRow, write_calibration
from ...calibrate.collectives_rank import BACKENDS, WARMUP, CalibrationJob, calibrate_rank, evenly
from ...cluster.job import gather, machines
from ...host.temporary import temporary_folder
from ...host.terminal import progress_console, stdout_console
from ...launch.over_cluster import launch, places
from ...launch.start_ranks import Interrupted, Outcome
from ...results.fitted_table import plain_table
from ...results.provenance import device_class, machine, started
from ...sizes import parse_bytes, printable, show_bytes
from ..arguments import Parser, verb
from .disk import add_arguments, calibrate_disk

FOLDER = Path("results/calibration")
SIZES = "64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
DTYPES = ("float32", "bfloat16", "float16")


@verb
def calibrate(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0 written, 1 a rank failed, 2 the command was wrong, 130 stopped.

    Raises JobError where the processes of a job do not come together.
    """
    chosen = _parser().parse_args(arguments)
    _check(chosen)
    if chosen.disk is not None:
        return calibrate_disk(chosen)
    sizes = _sizes(chosen.sizes, chosen.world_size)
    gather()
    try:
        outcome = _run(chosen, sizes)
    except Interrupted:
        print("zerobench calibrate: stopped; nothing is recorded", file=sys.stderr)
        return 130
    if outcome.status != "ok":
        print(
            printable(f"zerobench calibrate: nothing is recorded: {outcome.status}: {outcome.reason}"), file=sys.stderr
        )
        return 1
    folder = chosen.out or FOLDER / device_class(chosen.device).replace(" ", "-") / f"N={chosen.world_size}"
    date = datetime.now(UTC).isoformat(timespec="seconds")
    where = started(machines(chosen.world_size))
    provenance = {"date": date, **where, **machine(chosen.device, BACKENDS[chosen.device])}
    found = write_calibration(folder, slowest(outcome.results, chosen.world_size, chosen.dtype), provenance)
    show(found)
    print(f"recorded in {folder}; zerobench.load_calibration reads it")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="zerobench calibrate",
        description="Measures every collective by size: the engine's own, torch's, and a copy in memory, in turns.",
    )
    parser.add_argument("--world-size", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--sizes", default=SIZES, help="of the full tensor, with commas (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=20, help="of every size (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for all of it (default: %(default)s)")
    parser.add_argument("--out", type=Path, help=f"a folder (default: {FOLDER}/DEVICE/N=RANKS, or disk)")
    add_arguments(parser)
    return parser


def _sizes(text: str, world_size: int) -> tuple[int, ...]:
    sizes = tuple(sorted({evenly(parse_bytes(size), world_size) for size in text.split(",") if size.strip()}))
    if len(sizes) < 2 or sizes[0] == 0:
        raise ValueError(f"--sizes {text}: give two sizes above 0 at least, as in 64KiB,1MiB,16MiB; a line needs two")
    return sizes


def _check(chosen: argparse.Namespace) -> None:
    if chosen.world_size < 1:
        raise ValueError(f"--world-size {chosen.world_size}: must be at least 1")
    if chosen.repetitions < 3:
        raise ValueError(f"--repetitions {chosen.repetitions}: must be at least 3, or a median says nothing")
    if chosen.out is not None and chosen.out.is_file():
        raise ValueError(f"--out {chosen.out}: is a file; name a folder")


def _run(chosen: argparse.Namespace, sizes: tuple[int, ...]) -> Outcome:
    with temporary_folder() as folder, _progress() as progress:
        jobs = [
            CalibrationJob(
                rank, chosen.world_size, chosen.device, place, chosen.dtype, sizes, chosen.repetitions, chosen.timeout,
            )
            for rank, place in enumerate(places(chosen.world_size, folder / "rendezvous"))
        ]  # fmt: skip
        task = progress.add_task(f"{len(sizes)} sizes, N={chosen.world_size}", total=chosen.repetitions + WARMUP)
        return launch(
            calibrate_rank,
            jobs,
            folder / "logs",
            chosen.timeout,
            lambda done: progress.update(task, completed=done),
        )


def _progress() -> Progress:
    rounds = TextColumn("{task.completed:.0f}/{task.total:.0f} rounds")
    return Progress(*Progress.get_default_columns()[:2], rounds, TimeElapsedColumn(), console=progress_console())


def slowest(ranks: list[list[dict[str, Any]]], world_size: int, dtype: str) -> list[TransferRow]:
    """Returns a row per repetition, with the slowest rank's time. `ranks`: the results of each."""
    rows = []
    for same in zip(*ranks, strict=True):
        seconds = max(row["seconds"] for row in same)
        rows.append(TransferRow(**(same[0] | {"seconds": seconds}), world_size=world_size, dtype=dtype))
    return rows


def show(found: Calibration) -> None:
    """Prints the lines, and the bandwidth at the largest size."""
    header = ["via", "collective", "latency µs", "bandwidth of the line", "95 %", "worst error"]
    rows = []
    for fit in found.fits:
        low, high = (show_bytes(value) for value in (fit.bytes_per_s_low, fit.bytes_per_s_high))
        rows.append(
            [fit.via, fit.collective, f"{1e6 * fit.latency_s:.0f}", f"{show_bytes(fit.bytes_per_s)}/s",
             f"{low} – {high}", f"{100 * fit.largest_error:.0f} %"]
        )  # fmt: skip
    stdout_console().print(plain_table(header, rows, left=2))
