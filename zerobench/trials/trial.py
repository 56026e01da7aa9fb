"""A trial: a cell that a sweeper proposed, and its outcome.

feasible     it ran, is within the memory limit, and has a value for each objective
infeasible   otherwise: invalid, oom, crash, timeout, diverged, or over the limit; its sweeper sees a failed job
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from hydra.core.utils import JobReturn, JobStatus

from ..config.cell import Cell
from ..config.sweeper import Objective
from ..records import RunRow
from ..results.frames import frame_of
from ..results.summary import summarize
from ..sizes import show_bytes
from ..sweep.search import used_bytes

Row = dict[str, Any]

OVER = "over the limit"
"""Status of a trial that needs more memory than permitted."""

ANSWERS = ("ok", "oom", "invalid", "diverged", OVER)
"""Statuses that answer a sweeper's question; others are failures of the run."""


class InfeasibleError(Exception):
    """Raised instead of the value of an infeasible trial."""


class MissingError(Exception):
    """Raised if an ok run has no value for an objective: then possibly no run of the sweep has one."""


class Failed(JobReturn):
    """The return of an infeasible trial: reading its value raises, without the line on stderr that Hydra prints."""

    @property  # type: ignore[misc]
    def return_value(self) -> Any:
        """Raises the error of the trial, which has no value."""
        raise self._return_value


@dataclass(eq=False)
class Trial:
    """A trial. `words`: the proposed overrides; `rows`: of its launches; `values`: of the objectives, none if it is
    infeasible.
    """

    number: int
    words: tuple[str, ...]
    cell: Cell
    status: str = ""
    reason: str = ""
    rows: Sequence[Row] = ()
    values: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return " ".join(word.lstrip("+") for word in self.words)

    def judge(self, rows: Sequence[Row], objectives: Sequence[Objective], limit_bytes: int | None) -> None:
        """Decides whether it is feasible, and takes its values, summarized over launches as in tables. Raises
        MissingError.
        """
        self.rows = rows
        found: Row = summarize(frame_of(list(rows), RunRow)).to_dict("records")[0]  # type: ignore[assignment]
        self.status, self.reason = found["status"], found["reason"]
        if self.status != "ok":
            return
        if limit_bytes is not None and used_bytes(found) > limit_bytes:
            self.status = OVER
            self.reason = f"needs {show_bytes(used_bytes(found))}, and the limit is {show_bytes(limit_bytes)}"
            return
        lacking = next((one.column for one in objectives if pd.isna(found[one.column])), "")
        if lacking:
            raise MissingError(f"objective={lacking}: {self.name} ran and has no such figure{_why_missing(found)}")
        self.values = tuple(float(found[one.column]) for one in objectives)

    def returned(self, signs: Sequence[int]) -> JobReturn:
        """Returns the result of a Hydra launcher. `signs`: -1 for each value that the sweeper receives negated."""
        if not self.values:
            failed = Failed(overrides=self.words, status=JobStatus.FAILED)
            failed._return_value = InfeasibleError(f"{self.name}: {self.status}: {self.reason}")
            return failed
        told = [sign * value for sign, value in zip(signs, self.values, strict=True)]
        return JobReturn(
            overrides=self.words, status=JobStatus.COMPLETED, _return_value=told[0] if len(told) == 1 else told
        )


def _why_missing(row: Row) -> str:
    if row["backend"] == "simulated":
        return ": a simulated world has no times and no losses"
    return "; zerobench columns --table runs explains it, and measure.passes=both measures bytes and times"


def best_of(trials: Sequence[Trial], objectives: Sequence[Objective]) -> list[Trial]:
    """Returns the best feasible trial, the first of equals; for several objectives, the Pareto front."""
    feasible = list({trial.cell.cell_id: trial for trial in reversed(trials) if trial.values}.values())[::-1]
    if len(objectives) == 1:
        found: Trial | None = None
        for trial in feasible:
            if found is None or objectives[0].better(trial.values[0], found.values[0]):
                found = trial
        return [found] if found is not None else []
    return [one for one in feasible if not any(_dominates(other, one, objectives) for other in feasible)]


def _dominates(one: Trial, other: Trial, objectives: Sequence[Objective]) -> bool:
    pairs = list(zip(objectives, one.values, other.values, strict=True))
    better = any(objective.better(mine, theirs) for objective, mine, theirs in pairs)
    return better and not any(objective.better(theirs, mine) for objective, mine, theirs in pairs)
