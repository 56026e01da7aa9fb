"""The definition of a section of the suite: cells for the harness or tasks of its own, and the table that they make.

SuiteSection   an entry of SECTIONS
SuiteSetup     the device and scale of the suite
SuiteLaunch      a launch or a task: waiting, then its end
SuiteTable     a section's output on its Dones
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerobench.config.cell import Cell, CellConfig
from zerobench.config.compose import compose_cells
from zerobench.launch.rank_main import Worker
from zerobench.sections import known

WAITING, NOT_RUN = "waiting", "not run"
"""Besides the statuses of a RunRow: not yet reached, and no time was left."""

OURS = "zero1,zero2,zero3"
NONE = "–"


@dataclass(frozen=True)
class SuiteSetup:
    """`device`: cuda or cpu. `small`: tiny models and few steps. `device_bytes`: the device's memory."""

    out: Path
    device: str
    small: bool
    device_bytes: int

    def cells(self, section: str, *overrides: str) -> list[Cell]:
        """The cells of a sweep, as a user would type it, that write to this section's folder."""
        cells = compose_cells(["-m", *overrides, f"device={self.device}"])
        return [cell.changed(results_dir=str(self.folder(section))) for cell in cells]

    def folder(self, section: str) -> Path:
        """Returns the folder of a section's runs."""
        return self.out / "runs" / section


@dataclass(frozen=True)
class SuiteTask:
    """Ranks that are no cell: `jobs`, given a file that they may meet at, makes one each. The result is rank 0's."""

    name: str
    worker: Worker
    jobs: Callable[[str], list[Any]]
    limit_s: float


@dataclass
class SuiteLaunch:
    """`row`: a RunRow of a cell's launch. `result`: what a task found."""

    name: str
    config: CellConfig | None = None
    """Run of a cell; None for a task."""
    status: str = WAITING
    reason: str = ""
    seconds: float = 0.0
    reused: bool = False
    row: dict[str, Any] | None = None
    result: Any = None

    @property
    def cell(self) -> CellConfig:
        """The config of a launch that is a cell's."""
        return known(self.config)

    @property
    def is_ok(self) -> bool:
        """True if it has a usable result."""
        return self.status == "ok"

    @property
    def words(self) -> str:
        """The status, with the reason where there is one, in a line."""
        return f"{self.status}: {self.reason}" if self.reason else self.status


@dataclass(frozen=True)
class SuiteTable:
    """`rows` of text below `header`. `differs`: sentences on what is not as it must be; one fails the suite."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SuiteSection:
    """`asks`: the question in a sentence. `seconds`: of its launches on an H100. `answers`: how a launch may end so
    that the question is answered. `may_fail`: whether nothing is wrong if this one does not run. `limit_s`: most that a
    pass of a cell may take.
    """

    name: str
    title: str
    asks: str
    seconds: int
    table: Callable[[SuiteSetup, list[SuiteLaunch]], SuiteTable]
    cells: Callable[[SuiteSetup], list[Cell]] = lambda _: []
    tasks: Callable[[SuiteSetup], list[SuiteTask]] = lambda _: []
    answers: tuple[str, ...] = ("ok",)
    may_fail: Callable[[SuiteLaunch], bool] = lambda _: False
    limit_s: float = 60.0


def shorter(done: Sequence[SuiteLaunch]) -> tuple[dict[str, str], list[str]]:
    """Names less the words that all of them have, and a note with these."""
    names = [one.name.split() for one in done]
    common = [word for word in names[0] if all(word in other for other in names)] if len(names) > 1 else []
    short = {one.name: " ".join(w for w in name if w not in common) for one, name in zip(done, names, strict=True)}
    return short, [f"all: {' '.join(common)}"] if common else []


def padded(start: list[str], words: str, width: int) -> list[str]:
    """A line of a table of `width` columns that has `words` after its start and nothing more."""
    return [*start, words, *[NONE] * (width - len(start) - 1)]
