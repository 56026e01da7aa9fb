"""The SLURM of a campaign, of two nodes on this machine, and the jobs in its queue.

lost     a node whose slurmd was killed with all that it had started, as by a loss of power; it comes back after a while
held     a process of a job that SLURM still has: it outlives the command that submitted it, and is no orphan
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.slurm import Slurm
from zerobench.dispatch.slurm import OVER

from .kinds import Kind

SETTLE_S = 240.0
"""Time for the jobs that killed commands have left in the queue: each begins, finds that it is not wanted, and ends."""


class Nodes:
    """The nodes of a campaign's SLURM."""

    def __init__(self, slurm: Slurm) -> None:
        self.slurm = slurm

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a command that submits jobs."""
        return self.slurm.environment

    def living(self) -> dict[int, str]:
        """Returns process id of the slurmd -> name, of the nodes that are there."""
        return {process.pid: name for name, process in list(self.slurm.nodes.items()) if process.poll() is None}

    def lose(self, name: str, away_s: float) -> None:
        """Kills a node and brings it back after that time, whether SLURM has noticed or not."""
        self.slurm.kill_node(name)
        time.sleep(away_s)
        self.slurm.start_node(name)

    def unfinished(self) -> set[str]:
        """Returns the ids of the jobs that run or wait."""
        return {one for one, (state, _) in self.slurm.jobs().items() if state not in OVER}

    def cancel(self) -> None:
        """Cancels all jobs."""
        self.slurm.ask("scancel", "--quiet", "--me")

    def settle(self) -> set[str]:
        """Waits until no job runs or waits; returns those that still do after SETTLE_S."""
        deadline = time.monotonic() + SETTLE_S
        while (left := self.unfinished()) and time.monotonic() < deadline:
            time.sleep(1.0)
        return left


@contextmanager
def nodes_of(kind: Kind) -> Iterator[Nodes | None]:
    """Runs a SLURM for the duration of the context, where the kind needs one."""
    if not kind.on_slurm:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="fire-slurm-"))  # not below --work: the path of a socket must be short
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield Nodes(slurm)
    finally:
        slurm.stop()
        shutil.rmtree(folder, ignore_errors=True)
