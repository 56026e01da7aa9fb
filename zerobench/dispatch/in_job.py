"""The job's side: the command, started again in a launcher's job, runs the launches in the job's folder.

Each launch is reused or run as in a local sweep, and its row is written to the results folder before the job's folder.
A job that is started again, such as after a preemption, resumes at the first launch without a row.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..cluster import launchers
from ..cluster.job import current_job, gather
from ..config.cell import Cell
from ..config.compose import checker
from ..launch import fork_server
from ..sweep.progress import Reporter
from ..sweep.sweep import Sweep
from .job_folder import JobFolder
from .task import JOB


def run_in_job(extra_dirs: list[Path]) -> int:
    """Runs the launches of this command's job. Returns the exit code: 0 all ok, 1 one failed, 130 stopped."""
    fork_server.start()
    checker(extra_dirs)  # users' registered models are known from here on
    return run_launches(JobFolder(Path(os.environ.pop(JOB))))


def run_launches(folder: JobFolder) -> int:
    """Runs the launches in a job's folder. Returns the exit code."""
    gather()
    rows: list[dict[str, Any] | None] = folder.rows()
    launches = folder.launches()
    placed = {id(one.cell): _placed(one.cell) for one in launches}
    launches = [replace(one, cell=placed[id(one.cell)]) for one in launches]
    with (
        launchers.by(folder.order()["launcher"], lambda: folder.is_to_stop),
        Reporter(board_in=folder.path) as reporter,
    ):
        sweep = Sweep(reporter)
        reporter.expect(launches)
        for launch in launches[len(rows) :]:
            failed = [one.cell for one, row in zip(launches, rows, strict=False) if row and row["status"] != "ok"]
            if any(launch.cell is cell for cell in failed):
                reporter.skip(launch)
                rows.append(None)
            elif (row := sweep.run_one(launch)) is not None:
                rows.append(row)
            if sweep.unwritten:
                folder.write_unwritten(sweep.unwritten)
            folder.write_rows(rows)
            if sweep.stopped:
                return 130
            if rows[-1] is not None and rows[-1]["status"] != "ok" and launch.cell.config.fail_fast:
                break
    return int(any(row is not None and row["status"] != "ok" for row in rows))


def _placed(cell: Cell) -> Cell:
    """Returns the cell with the job's actual number of machines, which may differ from the requested number."""
    mine = current_job()
    return cell if mine is None else cell.changed(nodes=max(1, mine.membership.machines(cell.config.world_size)))
