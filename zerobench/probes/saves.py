"""Saves of a checkpoint in the measured steps: how long each holds the loop, and how long until the next may begin.

A save is the last phase of a step. An asynchronous one copies this rank's states to host memory, and a thread writes
them while the next steps run; a save that finds the one before unfinished waits for it. The first comes after the last
step of the warm-up: it makes the ranks' group for checkpoints, and is not measured. The checkpoint lies in the run's
folder while the steps run, each save replaces the one before, and the last is removed.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, Self

from .intervals import SAVE
from .probe import Probe

NONE, ASYNCHRONOUS = "none", "asynchronous"

FOLDER = "saves"
"""Folder of the checkpoint in a run's; a rank that is killed leaves it."""


class Saves:
    """The saves of one rank. `how`: a word of the key measure.save; `every`: measured steps from one save to the next.
    `begun`: numbers of the steps that end with a save; `in_flight`: of those in which one is copied or written.
    """

    def __init__(self, how: str, every: int, warmup: int, folder: Path, rank: int) -> None:
        self._how, self._every, self._warmup, self._rank = how, every, warmup, rank
        self._path = folder / FOLDER / "checkpoint"
        self.begun: list[int] = []
        self.in_flight: set[int] = set()
        self.checkpoint_bytes: int | None = None
        """Size of the last checkpoint's files, on rank 0."""
        self._returned: dict[int, tuple[float, Any]] = {}
        self._last: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Waits for the last save, unless the steps failed, and removes the checkpoint."""
        if error[0] is None and self._last is not None:
            self._last.wait()
        if self._rank == 0 and self.begun:
            files = self._path.glob("*")
            self.checkpoint_bytes = sum(file.stat().st_size for file in files) if error[0] is None else None
            shutil.rmtree(self._path.parent, ignore_errors=True)

    def after_update(self, number: int, engine: Any, probe: Probe) -> None:
        """Saves, if it is due after step `number`. Collective."""
        measured = number - self._warmup + 1
        if self._how != NONE and measured >= 0 and measured % self._every == 0:
            self.begun.append(number)
            self.in_flight.add(number)
            with probe.phase(SAVE):
                self._last = engine.save(self._path, asynchronous=self._how == ASYNCHRONOUS)
            self._returned[number] = time.perf_counter(), self._last
        if self._last is not None and not self._last.done():
            self.in_flight.add(number + 1)

    def written_s(self, number: int) -> float:
        """Returns the seconds for which the save of a step was still written once the loop went on."""
        returned, handle = self._returned[number]
        return 0.0 if handle is None else max(0.0, handle.ended - returned)
