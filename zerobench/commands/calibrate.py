"""`zerobench calibrate`: the cost of each collective by size, for the engine, for torch and for a copy in memory."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..host.job import gather, machines
from ..host.pipes import print_line, print_note
from ..host.temporary import temporary_folder
from ..host.terminal import progress_bar, stdout_console
from ..ranks import collectives
from ..ranks.over_cluster import launch, places
from ..ranks.start_ranks import LaunchError
from ..results.grid import Grid
from ..results.options import Parser, time_limit, verb
from ..results.provenance import device_class, machine, started
from ..sizes import parse_bytes, show_bytes

FOLDER = Path("results/calibration")
SIZES = "64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
DTYPES = ("float32", "bfloat16", "float16")


@verb
def calibrate(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0 written, 1 a rank failed, 2 the command was wrong, 130 stopped.

    Raises JobError if the processes of a job do not come together.
    """
    title = "Measures the time of collectives by size, in turns: the engine's, torch's, and a copy in memory."
    parser = Parser("zerobench calibrate", title)
    add = parser.add_argument
    add("--world-size", type=int, default=2, help="ranks (default: %(default)s)")
    add("--sizes", default=SIZES, help="sizes of the full tensor, comma-separated (default: %(default)s)")
    add("--repetitions", type=int, default=20, help="repetitions of each size (default: %(default)s)")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="default: %(default)s")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    add("--timeout", type=time_limit, default=600, help="seconds for the launch of the ranks (default: %(default)s)")
    add("--out", type=Path, help=f"a folder (default: {FOLDER}/DEVICE/N=RANKS, N=RANKS-DTYPE for another)")
    chosen = parser.parse_args(arguments)
    if chosen.world_size < 1:
        raise ValueError(f"--world-size {chosen.world_size}: must be at least 1")
    if chosen.repetitions < 3:
        raise ValueError(f"--repetitions {chosen.repetitions}: must be at least 3, or a median says nothing")
    if chosen.out is not None and chosen.out.is_file():
        raise ValueError(f"--out {chosen.out}: is a file; name a folder")
    if chosen.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("--device cuda: this machine has no GPU that torch can use; use --device cpu")
    given = (size for size in chosen.sizes.split(",") if size.strip())
    sizes = tuple(sorted({collectives.evenly(parse_bytes(size), chosen.world_size) for size in given}))
    if len(sizes) < 2 or sizes[0] == 0:
        message = "give two sizes above 0 at least, as in 64KiB,1MiB,16MiB; a line needs two"
        raise ValueError(f"--sizes {chosen.sizes}: {message}")
    gather()
    title, rounds = f"{len(sizes)} sizes, N={chosen.world_size}", chosen.repetitions + collectives.WARMUP
    try:
        with temporary_folder() as scratch, progress_bar(title, rounds, "rounds") as report:
            jobs = [
                collectives.CalibrationJob(
                    rank, chosen.world_size, chosen.device, rendezvous, chosen.dtype, sizes, chosen.repetitions,
                    chosen.timeout,
                )
                for rank, rendezvous in enumerate(places(chosen.world_size, scratch / "rendezvous"))
            ]  # fmt: skip
            times = launch(collectives.calibrate_rank, jobs, scratch / "logs", chosen.timeout, report)
    except LaunchError as error:
        print_note(f"zerobench calibrate: nothing is recorded: {error}")
        return 1
    except KeyboardInterrupt:
        print_note("zerobench calibrate: stopped; nothing is recorded")
        return 130
    name = f"N={chosen.world_size}" + ("" if chosen.dtype == DTYPES[0] else f"-{chosen.dtype}")
    folder = chosen.out or FOLDER / device_class(chosen.device).replace(" ", "-") / name
    provenance = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **started(machines(chosen.world_size)),
        **machine(chosen.device, collectives.BACKENDS[chosen.device]),
    }
    transfers = slowest(times, chosen.world_size, chosen.dtype)
    rows = []
    for fit in collectives.write_calibration(folder, transfers, provenance).fits:
        low, high = (show_bytes(value) for value in (fit.bytes_per_s_low, fit.bytes_per_s_high))
        rows.append(
            [fit.via, fit.collective, f"{1e6 * fit.latency_s:.0f}", f"{show_bytes(fit.bytes_per_s)}/s",
             f"{low} – {high}", f"{100 * fit.largest_error:.0f} %"]
        )  # fmt: skip
    header = ["via", "collective", "latency µs", "bandwidth of the line", "95 %", "worst error"]
    stdout_console().print(Grid(header, rows, left=2))
    print_line(f"recorded in {folder}; zerobench.load_calibration reads it")
    return 0


def slowest(ranks: list[list[dict[str, Any]]], world_size: int, dtype: str) -> list[collectives.TransferRow]:
    """Returns a row per repetition, with the slowest rank's time. `ranks`: the results of each."""
    rows = []
    for same in zip(*ranks, strict=True):
        seconds = max(row["seconds"] for row in same)
        rows.append(collectives.TransferRow(**(same[0] | {"seconds": seconds}), world_size=world_size, dtype=dtype))
    return rows
