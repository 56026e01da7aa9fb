"""The ranks that are left of a job, and the cells that they can hold.

A machine that dies takes its ranks along: they are *lost* (cluster/job.py). The cell that ran then is a crash. Each
later cell looks anew, gets the first N living ranks of the job, and records on how many machines these are: a run on
other machines than were meant is another cell. One of more ranks than are left is a crash as well, with a sentence;
the next start of the command, in a new job, runs it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..cluster.job import JobContext, RankInfo, current_job
from ..config.cell import Cell, CellConfig
from ..host.environment import SIMULATED
from .start_ranks import Interrupted

INTERRUPTED = "was stopped by the user"
"""The reason with which a process leaves on Ctrl-C or SIGTERM: the whole command ends then."""

LATER = "the same command runs it in a new job"


def look(mine: JobContext, ranks: Iterable[int] | None = None) -> None:
    """Looks for lost ranks. Raises Interrupted where one of them was stopped by the user."""
    mine.look(ranks)
    if INTERRUPTED in mine.lost.values():
        raise Interrupted


def place(cell: Cell) -> Cell:
    """Returns the cell as the ranks that are left run it: itself, or one on another number of machines."""
    mine = _with_losses()
    if mine is None or cell.problems or _does_not_fit(mine, cell.config):
        return cell
    nodes = mine.living.machines(cell.config.world_size)
    return cell if cell.config.backend == SIMULATED or nodes == cell.config.nodes else cell.changed(nodes=nodes)


def why_not(config: CellConfig) -> str | None:
    """Returns why the ranks that are left cannot hold a cell; None where they can, and where none is lost."""
    mine = _with_losses()
    return None if mine is None else _does_not_fit(mine, config)


def too_few(mine: JobContext, ranks: int) -> str:
    """Returns the sentence for a world that is larger than what is left of the job."""
    where = sorted({info.machine for info in mine.membership.members if info.rank in mine.lost})
    left = f"{len(mine.living.members)} of the job's {mine.job.world_size} ranks are left, without those of"
    return f"world_size={ranks}: {left} {', '.join(where)}; {LATER}"


def why_lost(mine: JobContext, info: RankInfo) -> str:
    """Returns why a rank is lost, with its place in the job."""
    return f"{mine.lost[info.rank]} (rank {info.rank} of the job, on {info.machine})"


def _with_losses() -> JobContext | None:
    mine = current_job()
    if mine is not None:
        look(mine)
    return mine if mine is not None and mine.lost else None


def _does_not_fit(mine: JobContext, config: CellConfig) -> str | None:
    ranks = 1 if config.backend == SIMULATED else config.world_size
    if ranks > len(mine.living.members):
        return too_few(mine, ranks)
    sharing = mine.living.ranks_per_gpu(ranks) if config.device == "cuda" else 1
    if sharing == config.ranks_per_gpu or max(sharing, config.ranks_per_gpu) <= 1:
        return None
    words = f"the ranks that are left are {sharing} per GPU, and the cell was composed for {config.ranks_per_gpu}"
    return f"world_size={ranks}: {words}; {LATER}"
