"""Others' measured peaks next to our estimates: each published run is simulated on fake tensors and compared.

A run that leaves something open is simulated as its systems do it by default, and the file of errors says so; a run
that is more than 5 % off is simulated again with one thing changed at a time, for a cause. Executed cells stay in the
folder --cache, so that the same command goes on where it was stopped.

    python -m validation published-runs --runs mine.csv --out errors.csv
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from zerobench.fake_execution import Execution, Limits
from zerobench.host.terminal import stdout_console
from zerobench.results.grid import Grid
from zerobench.results.provenance import source_of
from zerobench.sizes import printable, show_count

from ..runner import execute_cells
from ..store import Store, write
from .causes import CLOSE, ExecutedSizes, explain, is_explained, trials_of
from .cells import RunPlan, plan_of
from .rows import SIMULATED, NotGivenError, PublishedRun, read

RUNS = Path("results/published_runs/training.csv")
ERRORS = Path("results/published_runs/errors.csv")
CACHE = Path("results/runs/published_runs")
NEEDED = (*SIMULATED, "peak_mem_gib", "peak_kind")

NO_PEAK, NO_ESTIMATE, FAILED, COMPARED, OUT_OF_MEMORY = "no peak", "no estimate", "failed", "compared", "out of memory"
"""Every status of a run; the last one did not fit, by its source, whose notes begin with OOM."""


@dataclass(frozen=True)
class PeakRow:
    """A run in the errors file: columns as in the file that was read, then the estimate. `reason`: why there is none;
    `explanation`: a cause of the error; `eager_*`: the estimate of a compiled run without a compiler.
    """

    id: str
    source: str
    system: str
    strategy: str
    model: str
    gpus: int | None
    seq: int | None
    micro_batch: int | None
    precision: str
    act_ckpt: str
    compile: str
    peak_kind: str
    published_gib: float | None
    status: str
    estimate_low_gib: str = ""
    estimate_high_gib: str = ""
    error_percent: str = ""
    explanation: str = ""
    assumed: str = ""
    reason: str = ""
    eager_low_gib: str = ""
    eager_high_gib: str = ""
    eager_error_percent: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    words = "the published runs, a row each, in the columns of docs/reference/validated.md (default: %(default)s)"
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="CSV", help=words)
    parser.add_argument("--out", type=Path, default=ERRORS, metavar="CSV", help="for the errors (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help="for executed cells: %(default)s")
    parser.add_argument("--jobs", type=int, help="cells at once (default: one per core)")


def run(chosen: argparse.Namespace) -> int:
    """Compares the runs of a file and writes the errors. Returns 1 if a run could not be executed."""
    rows = compare(read(chosen.runs, NEEDED), ExecutedCells(chosen.cache, chosen.jobs))
    write(chosen.out, PeakRow, rows)
    show(rows)
    print(f"{chosen.out}: {show_count(len(rows), 'row')}")
    return int(any(row.status == FAILED for row in rows))


class ExecutedCells:
    """Sizes of executed cells, by plan. Executions that have failed are tried again by the next command."""

    def __init__(self, folder: Path, jobs: int | None = None) -> None:
        self._store = Store(folder / "cells.csv", ExecutedSizes, lambda row: row.key)
        self._jobs = jobs
        self.problems: dict[str, str] = {}

    def execute(self, what: str, plans: Sequence[RunPlan]) -> None:
        """Executes the cells that no command has executed yet."""
        due = {
            key: plan for key, plan in {key_of(plan): plan for plan in plans}.items() if key not in self._store.found
        }
        keys = list(due)

        def take(number: int, found: Execution) -> None:
            if found.problem:
                self.problems[keys[number]] = found.problem
                return
            allocated = found.allocated_bytes if found.allocated_bytes is not None else found.peak_bytes
            low, high = found.reserved_bytes or (allocated, allocated)
            self._store.put([ExecutedSizes(keys[number], allocated, low, high)])

        execute_cells(what, [(plan.config, plan.target) for plan in due.values()], self._jobs, Limits(), take)

    def of(self, plan: RunPlan) -> ExecutedSizes | None:
        """Returns the sizes of a plan; None if its execution failed."""
        rows = self._store.found.get(key_of(plan))
        return rows[0] if rows else None


def key_of(plan: RunPlan) -> str:
    """Names a cell, its device, and the code and torch that execute it."""
    code, release = source_of(plan.config), torch.__version__
    return f"{plan.config.cell_id} {plan.target.kind} {plan.target.attention or 'auto'} {code} {release}"


def compare(runs: Sequence[PublishedRun], cells: ExecutedCells) -> list[PeakRow]:
    """Returns a row for each run, in their order."""
    plans: dict[str, RunPlan] = {}
    rows = {run.id: _planned(run, plans) for run in runs}
    eager = {name: plan.changed(compile="none") for name, plan in plans.items()}
    cells.execute("published runs", [*plans.values(), *eager.values()])
    far = []
    for run in runs:
        if plan := plans.get(run.id):
            rows[run.id] = _judged(rows[run.id], run, plan, eager[run.id], cells)
            sizes = cells.of(plan)
            if sizes is None or rows[run.id].status != COMPARED:
                continue
            if abs(sizes.error(run.peak_kind, run.peak_mem_gib or 0)) > CLOSE:
                far.append((run, sizes))
    tried: dict[str, list[tuple[str, ExecutedSizes]]] = {run.id: [] for run, _ in far}
    for count in (1, 2):
        trials = {run.id: list(trials_of(run, plans[run.id], count)) for run, _ in far}
        cells.execute(f"causes, {count} at a time", [plan for mine in trials.values() for _, plan in mine])
        for run, sizes in far:
            tried[run.id] += [(words, found) for words, plan in trials[run.id] if (found := cells.of(plan))]
            rows[run.id] = replace(rows[run.id], explanation=explain(run, sizes, tried[run.id]))
        far = [(run, sizes) for run, sizes in far if not is_explained(rows[run.id].explanation)]
    return list(rows.values())


def _planned(run: PublishedRun, plans: dict[str, RunPlan]) -> PeakRow:
    """Returns a run's row before its execution, and adds its plan to `plans` if it has one."""
    about = {name: getattr(run, name) for name in PeakRow.__dataclass_fields__ if hasattr(run, name)}
    row = PeakRow(**about, published_gib=run.peak_mem_gib, status=NO_PEAK)
    ran_out_of_memory = run.notes.startswith("OOM")
    if run.peak_mem_gib is None and not ran_out_of_memory:
        return replace(row, reason="the source prints none")
    try:
        plan = plans[run.id] = plan_of(run)
    except NotGivenError as error:
        return replace(row, status=NO_ESTIMATE, reason=str(error))
    return replace(row, status=OUT_OF_MEMORY if ran_out_of_memory else COMPARED, assumed="; ".join(plan.assumed))


def _judged(row: PeakRow, run: PublishedRun, plan: RunPlan, eager: RunPlan, cells: ExecutedCells) -> PeakRow:
    sizes = cells.of(plan)
    if sizes is None:
        return replace(row, status=FAILED, reason=cells.problems[key_of(plan)])
    if row.status == OUT_OF_MEMORY:
        return replace(row, **_estimate("estimate_{}_gib", sizes, "?"))
    assert run.peak_mem_gib is not None
    percent = f"{100 * sizes.error(run.peak_kind, run.peak_mem_gib):+.1f}"
    row = replace(row, **_estimate("estimate_{}_gib", sizes, run.peak_kind), error_percent=percent)
    plain = cells.of(eager) if plan.config.compile != "none" else None
    if plain is None:
        return row
    percent = f"{100 * plain.error(run.peak_kind, run.peak_mem_gib):+.1f}"
    return replace(row, **_estimate("eager_{}_gib", plain, run.peak_kind), eager_error_percent=percent)


def _estimate(column: str, sizes: ExecutedSizes, kind: str) -> dict[str, Any]:
    """Returns the two columns of a range, in five digits at least, so that small models are not rounded away."""
    return {column.format(end): f"{gib:.5g}" for end, gib in zip(("low", "high"), sizes.range_gib(kind), strict=True)}


def show(rows: Sequence[PeakRow]) -> None:
    """Prints the rows that were compared, what explains errors beyond 5 %, why others have no estimate, and counts."""
    console = stdout_console()
    compared = [row for row in rows if row.status == COMPARED]
    shown = ("id", "peak_kind", "published_gib", "estimate_low_gib", "estimate_high_gib", "error_percent")
    lines = [[str(getattr(row, name)) for name in shown] for row in compared]
    console.print(Grid(["run", "kind", "published GiB", "estimate GiB", "to", "error %"], lines, left=2))
    for row in rows:
        if row.status != NO_PEAK and (row.explanation or row.reason):
            words = printable(f"{row.id}: {row.explanation or row.reason}")
            console.print(words, markup=False, highlight=False, soft_wrap=True)
    counts = Counter(row.status for row in rows)
    console.print(", ".join(f"{count} {status}" for status, count in counts.most_common()), highlight=False)
    if errors := [abs(float(row.error_percent)) for row in compared]:
        explained = sum(bool(row.explanation) and is_explained(row.explanation) for row in compared)
        words = f"median |error| {median(errors):.1f} %; within {CLOSE:.0%}: {sum(e <= 100 * CLOSE for e in errors)} of"
        console.print(f"{words} {len(errors)}, {explained} more with a cause that was tried", highlight=False)
