"""Others' measured peaks next to our estimates: each published run is simulated on fake tensors and compared.

A run that leaves something open is executed as its systems do it by default, and the file of errors says so; a run
that is more than 5 % off is executed again with one thing changed at a time, for a cause. What was executed stays in
the folder --cache, so that the same command goes on where it was stopped.

    python -m validation published-runs --runs mine.csv --out errors.csv
"""

from __future__ import annotations

import argparse
import csv
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from zerobench.fake_execution import Execution, Limits
from zerobench.host.terminal import stdout_console
from zerobench.published.cells import RunPlan, plan_of
from zerobench.published.rows import NotGivenError, PublishedRun, read
from zerobench.results.grid import Grid
from zerobench.results.provenance import source_of
from zerobench.sizes import printable, show_count

from ..runner import execute_cells
from ..store import Store
from .causes import (
    CLOSE,
    GIB,
    CauseTrial,
    ExecutedSizes,
    Judged,
    error_of,
    explained,
    is_part,
    range_of,
    sizes_of,
    trials_of,
)

RUNS = Path("results/published_runs/training.csv")
ERRORS = Path("results/published_runs/errors.csv")
CACHE = Path("results/runs/published_runs")

COLUMNS = (
    "id", "source", "system", "strategy", "model", "gpus", "seq", "micro_batch", "precision", "act_ckpt", "compile",
    "peak_kind", "published_gib", "status", "estimate_low_gib", "estimate_high_gib", "error_percent", "explanation",
    "assumed", "reason", "eager_low_gib", "eager_high_gib", "eager_error_percent",
)  # fmt: skip
"""Columns of the errors file; those of a run are as in the file that was read, the last three of a compiled one as it
would be without a compiler.
"""

OUT_OF_MEMORY = "out of memory"
"""Status of a run that did not fit, by its source."""

LISTED = ("compared", OUT_OF_MEMORY, "failed", "no estimate", "no peak")
"""Every status, in the order of the summary."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    words = "the published runs, a row each, in the columns of docs/reference/validated.md (default: %(default)s)"
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="CSV", help=words)
    parser.add_argument("--out", type=Path, default=ERRORS, metavar="CSV", help="for the errors (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help="for executed cells: %(default)s")
    parser.add_argument("--jobs", type=int, help="cells at once (default: one per core)")


def run(chosen: argparse.Namespace) -> int:
    """Compares the runs of a file and writes the errors. Returns 1 if a run could not be executed."""
    runs = read(chosen.runs)
    judged = compare(runs, ExecutedCells(chosen.cache, chosen.jobs))
    _write(judged, chosen.out)
    show(judged, stdout_console())
    print(f"{chosen.out}: {show_count(len(judged), 'row')}")
    return int(any(one.status == "failed" for one in judged))


@dataclass(frozen=True)
class SizesRow:
    """An executed cell in the cache. `key`: the cell, its device, and the code and torch that executed it."""

    key: str
    allocated_bytes: int
    reserved_low_bytes: int
    reserved_high_bytes: int


class ExecutedCells:
    """ExecutedSizes of executed cells, by plan. Executions that have failed are tried again by the next command."""

    def __init__(self, folder: Path, jobs: int | None = None) -> None:
        self._store = Store(folder / "cells.csv", SizesRow, lambda row: row.key)
        self._failed: dict[str, ExecutedSizes] = {}
        self._jobs = jobs

    def execute(self, what: str, plans: Sequence[RunPlan]) -> None:
        """Executes the cells that no command has executed yet."""
        due = [plan for key, plan in {_key(one): one for one in plans}.items() if key not in self._store.found]

        def take(number: int, found: Execution) -> None:
            sizes, key = sizes_of(found), _key(due[number])
            if found.problem:
                self._failed[key] = sizes
            else:
                self._store.put([SizesRow(key, *astuple(sizes)[:3])])

        execute_cells(what, [(plan.config, plan.target) for plan in due], self._jobs, Limits(), take)

    def of(self, plan: RunPlan) -> ExecutedSizes:
        """Returns the sizes of a plan that was executed."""
        found = self._store.found.get(_key(plan))
        return ExecutedSizes(*astuple(found[0])[1:]) if found else self._failed[_key(plan)]


def _key(plan: RunPlan) -> str:
    code, release = source_of(plan.config), torch.__version__
    return f"{plan.config.cell_id} {plan.target.kind} {plan.target.attention or 'auto'} {code} {release}"


def compare(runs: Sequence[PublishedRun], cells: ExecutedCells) -> list[Judged]:
    """Returns a row for each run, in their order."""
    first = [_planned(run) for run in runs]
    plans = [plan for _, plan in first if plan is not None]
    cells.execute("published runs", [*plans, *map(_eagerly, plans)])
    judged = [(one if plan is None else _judge(one, plan, cells), plan) for one, plan in first]
    far = {one.run.id: (one, plan) for one, plan in judged if plan and one.error is not None and not one.close}
    tried: dict[str, list[CauseTrial]] = {name: [] for name in far}
    for at_once in (1, 2):
        more = {name: list(trials_of(one.run, plan, at_once)) for name, (one, plan) in far.items()}
        cells.execute(f"causes, {at_once} at once", [one.plan for mine in more.values() for one in mine])
        for name, mine in more.items():
            tried[name] += mine
        far = {name: pair for name, pair in far.items() if is_part(_explain(*pair, tried[name], cells).explanation)}
    return [
        _explain(one, plan, tried[one.run.id], cells) if plan and one.run.id in tried else one for one, plan in judged
    ]


def _planned(run: PublishedRun) -> tuple[Judged, RunPlan | None]:
    if run.peak_mem_gib is None and not run.ran_out_of_memory:
        return Judged(run, "no peak", "the source prints none"), None
    try:
        plan = plan_of(run)
    except NotGivenError as error:
        return Judged(run, "no estimate", str(error)), None
    return Judged(run, "planned", assumed="; ".join(plan.assumed)), plan


def _eagerly(plan: RunPlan) -> RunPlan:
    return plan.changed(compile="none")


def _judge(one: Judged, plan: RunPlan, cells: ExecutedCells) -> Judged:
    run, sizes = one.run, cells.of(plan)
    if sizes.problem:
        return replace(one, status="failed", reason=sizes.problem)
    if run.ran_out_of_memory:
        low, high = range_of(sizes, "?")
        return replace(one, status=OUT_OF_MEMORY, low_bytes=low, high_bytes=high)
    assert run.peak_mem_gib is not None
    low, high = range_of(sizes, run.peak_kind)
    error = error_of(sizes, run.peak_kind, run.peak_mem_gib)
    eager = cells.of(_eagerly(plan)) if plan.config.compile != "none" else None
    return replace(one, status="compared", low_bytes=low, high_bytes=high, error=error, eager=eager)


def _explain(one: Judged, plan: RunPlan, trials: Sequence[CauseTrial], cells: ExecutedCells) -> Judged:
    assert one.error is not None
    found = [(trial, cells.of(trial.plan)) for trial in trials]
    return replace(one, explanation=explained(one.run, one.error, found, cells.of(plan)))


def _write(judged: Sequence[Judged], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    with aside.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(_cells(one) for one in judged)
    aside.replace(out)


def _cells(one: Judged) -> list[str]:
    run, eager = one.run, one.eager
    own = {
        "published_gib": run.peak_mem_gib, "status": one.status, "estimate_low_gib": _gib(one.low_bytes),
        "estimate_high_gib": _gib(one.high_bytes), "explanation": one.explanation, "assumed": one.assumed,
        "error_percent": None if one.error is None else f"{100 * one.error:+.1f}", "reason": one.reason,
        **dict.fromkeys(COLUMNS[-3:]),
    }  # fmt: skip
    if eager is not None and not eager.problem and run.peak_mem_gib is not None:
        sizes, error = range_of(eager, run.peak_kind), error_of(eager, run.peak_kind, run.peak_mem_gib)
        own |= zip(COLUMNS[-3:], [*map(_gib, sizes), f"{100 * error:+.1f}"], strict=True)
    return [_text(own[name] if name in own else getattr(run, name)) for name in COLUMNS]


def _gib(size: int | None) -> str | None:
    """Formats GiB in five digits at least, so that small models are not rounded away."""
    return None if size is None else f"{size / GIB:.5g}"


def _text(value: object) -> str:
    return "" if value is None else str(value)


def show(judged: Sequence[Judged], console: Console) -> None:
    """Prints the rows that were compared, what explains errors beyond 5 %, why others have no estimate, and counts."""
    there = [one for one in judged if one.status == "compared"]
    if there:
        header = ["run", "kind", "published GiB", "estimate GiB", "error"]
        console.print(Grid(header, [_line(one) for one in there], left=2))
    said = {one.run.id: one.explanation or one.reason for one in judged if one.status != "no peak"}
    for name, words in said.items():
        if words:
            console.print(printable(f"{name}: {words}"), markup=False, highlight=False, soft_wrap=True)
    counts = Counter(one.status for one in judged)
    console.print(", ".join(f"{counts[name]} {name}" for name in LISTED if counts[name]), highlight=False)
    errors = [abs(one.error) for one in there if one.error is not None]
    if errors:
        explained = sum(bool(one.explanation) and not is_part(one.explanation) for one in there)
        words = f"median |error| {median(errors):.1%}; within {CLOSE:.0%}: {sum(one.close for one in there)} of"
        console.print(f"{words} {len(there)}, {explained} more with a cause that was tried", highlight=False)


def _line(one: Judged) -> list[str]:
    low, high = _gib(one.low_bytes), _gib(one.high_bytes)
    estimate = str(low) if low == high else f"{low} to {high}"
    return [one.run.id, one.run.peak_kind, f"{one.run.peak_mem_gib:g}", estimate, f"{one.error:+.1%}"]
