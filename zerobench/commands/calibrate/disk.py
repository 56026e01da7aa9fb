"""`zerobench calibrate --disk`: the rates of a disk by plain calls, and the fraction that the engine's files reach."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.progress import Progress, TextColumn, TimeElapsedColumn

from ...calibrate.disk import DiskCalibration, DiskRow, write_disk_calibration
from ...calibrate.disk_rank import DiskPlan, measure
from ...host.terminal import progress_console, stdout_console
from ...results.fitted_table import plain_table
from ...results.provenance import machine
from ...sizes import parse_bytes, printable, show_bytes
from ...zero.offload.disk import ALIGN_BYTES, problems_of_path

FOLDER = Path("results/calibration/disk")
BLOCKS, DEPTHS, FILE = "1MiB,4MiB", "1,4,8", "256MiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of --disk."""
    group = parser.add_argument_group("a disk instead of collectives")
    words = "measure the disk of folder PATH (here): plain calls beside the engine's files, with and without checksums"
    group.add_argument("--disk", nargs="?", const=".", metavar="PATH", help=words)
    group.add_argument("--blocks", default=BLOCKS, help="bytes a request, with commas (default: %(default)s)")
    group.add_argument("--depths", default=DEPTHS, help="requests at once, with commas (default: %(default)s)")
    group.add_argument("--file", default=FILE, help="bytes a file; there are three (default: %(default)s)")
    group.add_argument("--buffered", action="store_true", help="through the page cache, not past it")


def calibrate_disk(chosen: argparse.Namespace) -> int:
    """Returns the exit code: 0 written, 1 the disk failed, 2 the command was wrong, 130 stopped."""
    plan = _plan(chosen)
    try:
        rows = _measure(plan)
    except KeyboardInterrupt:
        print("zerobench calibrate: stopped; nothing is recorded", file=sys.stderr)
        return 130
    except OSError as error:
        print(printable(f"zerobench calibrate: nothing is recorded: {error}"), file=sys.stderr)
        return 1
    folder = chosen.out or FOLDER
    date = datetime.now(UTC).isoformat(timespec="seconds")
    provenance = {"date": date, "disk": disk_of(plan.folder), **machine("cpu", "none")}
    show(write_disk_calibration(folder, rows, provenance))
    print(f"recorded in {folder}; zerobench.load_disk_calibration reads it")
    return 0


def _plan(chosen: argparse.Namespace) -> DiskPlan:
    """Builds the plan. Raises ValueError, a sentence, for invalid options."""
    blocks = tuple(parse_bytes(size) for size in chosen.blocks.split(",") if size.strip())
    depths = tuple(int(depth) if depth.strip().isdecimal() else 0 for depth in chosen.depths.split(","))
    size = parse_bytes(chosen.file)
    if not blocks or any(block < 1 or block % ALIGN_BYTES for block in blocks):
        raise ValueError(f"--blocks {chosen.blocks}: must be multiples of {ALIGN_BYTES} bytes, as in 1MiB,4MiB")
    if min(depths) < 1:
        raise ValueError(f"--depths {chosen.depths}: must be whole numbers from 1 on, as in 1,4,8")
    if any(size % block or size < 2 * block for block in blocks):
        raise ValueError(
            f"--file {chosen.file}: must be two blocks at least, and a multiple of each of {chosen.blocks}"
        )
    if problems := problems_of_path(chosen.disk):
        raise ValueError(f"--disk {problems[0]}")
    return DiskPlan(Path(chosen.disk).expanduser(), size, blocks, depths, chosen.repetitions, not chosen.buffered)


def _measure(plan: DiskPlan) -> list[DiskRow]:
    columns = (TextColumn("{task.completed:.0f}/{task.total:.0f} rounds"), TimeElapsedColumn())
    with Progress(*Progress.get_default_columns()[:2], *columns, console=progress_console()) as progress:
        words = f"{len(plan.blocks) * len(plan.depths)} settings, 3 files of {show_bytes(plan.file_bytes)}"
        task = progress.add_task(words, total=plan.rounds)
        return measure(plan, lambda done: progress.update(task, completed=done))


def show(found: DiskCalibration) -> None:
    """Prints throughput by kind, block and depth, and the fraction of the plain calls' that the engine's
    files reach.
    """
    header = ["kind", "block", "depth", "via", "a second", "95 %", "of raw", "95 %", "of bound", "CPU s/GiB"]
    rows = []
    for rate in found.rates:
        low, high = (show_bytes(value) for value in (rate.bytes_per_s_low, rate.bytes_per_s_high))
        rows.append(
            [rate.kind, show_bytes(rate.block_bytes), str(rate.depth), rate.via, show_bytes(rate.bytes_per_s),
             f"{low} – {high}", f"{rate.of_raw:.2f}", f"{rate.of_raw_low:.2f} – {rate.of_raw_high:.2f}",
             f"{rate.of_bound:.2f}", f"{rate.cpu_s_per_gib:.2f}"]
        )  # fmt: skip
    stdout_console().print(plain_table(header, rows, left=4))
    if not found.rates[0].direct:
        print("Without direct I/O: through the page cache, whose memory answers for the disk.")


def disk_of(folder: Path) -> dict[str, Any]:
    """Returns file system and device of a folder, as the kernel names them."""
    number = os.stat(folder).st_dev
    words = f"{os.major(number)}:{os.minor(number)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ")
        if left.split()[2] == words:
            kind, device = right.split()[:2]
            return {"file_system": kind, "device": device}
    return {"file_system": None, "device": words}
