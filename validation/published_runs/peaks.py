"""Others' measured peaks next to our estimates: each published run is simulated on fake tensors and compared.

A run that leaves something open is simulated as its systems do it by default, and the file of errors says so; a run
that is more than 5 % off is simulated again with one thing changed that the row leaves open, for a cause: a choice that
published code makes, named by its key. Executed cells stay in the folder --cache, so that the same command goes on
where it was stopped.

    python -m validation published-runs --runs mine.csv --out errors.csv
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zerobench.config.schema_memory import SCHEMAS
from zerobench.results.provenance import source_of
from zerobench.simulation.execute import Execution

from ..runner import execute_cells
from ..store import Store, write
from .cells import RunPlan, plan_of
from .rows import SIMULATED, NotGivenError, PublishedRun, read

RUNS = Path("results/published_runs/training.csv")
ERRORS = Path("results/published_runs/errors.csv")
CACHE = Path("results/runs/published_runs")
NEEDED = (*SIMULATED, "peak_mem_gib", "peak_kind")

NO_PEAK, NO_ESTIMATE, FAILED, COMPARED, OUT_OF_MEMORY = "no peak", "no estimate", "failed", "compared", "out of memory"
"""Every status of a run; the last one did not fit, by its source, whose notes begin with OOM."""


CLOSE = 0.05
"""Largest error that needs no explanation."""

GIB = 2**30

PART, NONE = "in part: ", "none of the causes that are known here"
"""How explanations begin that leave more than 5 %."""


@dataclass(frozen=True)
class ExecutedSizes:
    """Bytes of one executed cell, a row of the cache. `key`: the cell, its device, and the code and torch that executed
    it. `reserved_*`: of a GPU's allocator, by default and with expandable segments; on a CPU as allocated.
    """

    key: str
    allocated_bytes: int
    reserved_low_bytes: int
    reserved_high_bytes: int

    def range_gib(self, kind: str) -> tuple[float, float]:
        """Returns the lowest and highest estimate that stands next to a peak of `kind`: one figure if it is allocated;
        from allocated to the highest reserved if the source does not say.
        """
        low = self.reserved_low_bytes if kind == "reserved" else self.allocated_bytes
        high = self.allocated_bytes if kind == "allocated" else self.reserved_high_bytes
        return low / GIB, high / GIB

    def error(self, kind: str, published_gib: float) -> float:
        """Returns the error of the nearest end of the range, as a fraction of the published peak; 0 inside of it."""
        low, high = self.range_gib(kind)
        return min(max(published_gib, low), high) / published_gib - 1

    def columns(self, prefix: str, kind: str, published_gib: float | None) -> dict[str, Any]:
        """Returns the columns of the range, in five digits, as small models need them, and of the error."""
        low, high = self.range_gib(kind)
        texts = {f"{prefix}_low_gib": f"{low:.5g}", f"{prefix}_high_gib": f"{high:.5g}"}
        if published_gib is not None:
            name = "error_percent" if prefix == "estimate" else f"{prefix}_error_percent"
            texts[name] = f"{100 * self.error(kind, published_gib):+.1f}"
        return texts


def _no_masters(plan: RunPlan) -> RunPlan:
    precision: Any = plan.config.precision
    return plan.changed(precision=replace(precision, masters=False, wire_dtype=precision.name))


def _with_loss(plan: RunPlan, name: str) -> RunPlan:
    assert plan.config.huggingface is not None
    return plan.changed(huggingface=replace(plan.config.huggingface, loss=name))


Cause = tuple[str, Callable[[PublishedRun, RunPlan], bool], Callable[[RunPlan], RunPlan]]
"""Completes "within 5 % ..."; True if the row leaves the thing open; makes the other plan."""

CAUSES: tuple[Cause, ...] = (
    (
        "without fp32 master weights and states (precision.masters=false)",
        lambda run, plan: (
            plan.config.precision.name == "bf16"
            and plan.config.strategy.name.startswith("fsdp2")
            and bool({"precision", "masters"} & plan.open_keys)
        ),
        _no_masters,
    ),
    (
        "with all blocks recomputed, which the row leaves open (activation=checkpoint)",
        lambda run, plan: "act_ckpt" in plan.open_keys,
        lambda plan: plan.changed(activation=SCHEMAS["activation"]["checkpoint"]()),
    ),
    (
        "with blocks recomputed selectively, which the row leaves open (activation=selective)",
        lambda run, plan: "act_ckpt" in plan.open_keys,
        lambda plan: plan.changed(activation=SCHEMAS["activation"]["selective"]()),
    ),
    (
        "with the fp32 logits kept through the backward, as a loop does that holds on to what the model returned"
        " (huggingface.loss=kept)",
        lambda run, plan: run.compile in ("", "0") or "compile" in plan.open_keys,
        lambda plan: _with_loss(plan, "kept"),
    ),
    (
        "with the loss fused, as a compiler does: no fp32 logits (huggingface.loss=fused)",
        lambda run, plan: "compile" in plan.open_keys,
        lambda plan: _with_loss(plan, "fused"),
    ),
)


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
    words = "the published runs, a row each, in the columns of docs/reference/validated.md (default: %(default)s)"
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="CSV", help=words)
    parser.add_argument("--out", type=Path, default=ERRORS, metavar="CSV", help="for the errors (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help="for executed cells: %(default)s")


def run(chosen: argparse.Namespace) -> int:
    """Compares the runs of a file and writes the errors. Returns 1 if a run could not be executed."""
    rows = compare(read(chosen.runs, NEEDED), ExecutedCells(chosen.cache))
    write(chosen.out, PeakRow, rows)
    counts = Counter(row.status for row in rows)
    print(f"{chosen.out}: {', '.join(f'{count} {status}' for status, count in counts.most_common())}")
    return int(any(row.status == FAILED for row in rows))


class ExecutedCells:
    """Sizes of executed cells, by plan. Executions that have failed are tried again by the next command."""

    def __init__(self, folder: Path) -> None:
        self._store = Store(folder / "cells.csv", ExecutedSizes, lambda row: row.key)
        self.problems: dict[str, str] = {}

    def execute(self, what: str, plans: Sequence[RunPlan]) -> None:
        """Executes the cells that no command has executed yet."""
        due = {key: plan for plan in plans if (key := key_of(plan)) not in self._store.found}
        keys = list(due)

        def take(number: int, found: Execution) -> None:
            if found.problem:
                self.problems[keys[number]] = found.problem
                return
            allocated = found.allocated_bytes if found.allocated_bytes is not None else found.peak_bytes
            low, high = found.reserved_bytes or (allocated, allocated)
            self._store.put([ExecutedSizes(keys[number], allocated, low, high)])

        execute_cells(what, [(plan.config, plan.target) for plan in due.values()], take=take)

    def of(self, plan: RunPlan) -> ExecutedSizes | None:
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
    far = {}
    for run in (run for run in runs if run.id in plans):
        plan = plans[run.id]
        row = rows[run.id] = _judged(rows[run.id], run, plan, eager[run.id], cells)
        if row.status == COMPARED and abs(float(row.error_percent)) > 100 * CLOSE:
            far[run] = [(words, change(plan)) for words, applies, change in CAUSES if applies(run, plan)]
    cells.execute("causes", [plan for trials in far.values() for _, plan in trials])
    for run, trials in far.items():
        tried = [(words, sizes) for words, plan in trials if (sizes := cells.of(plan))]
        rows[run.id] = replace(rows[run.id], explanation=_explanation(run, rows[run.id], tried))
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
    sizes, plain = cells.of(plan), cells.of(eager) if plan.config.compile != "none" else None
    if sizes is None:
        return replace(row, status=FAILED, reason=cells.problems[key_of(plan)])
    if row.status == OUT_OF_MEMORY:
        return replace(row, **sizes.columns("estimate", "?", None))
    row = replace(row, **sizes.columns("estimate", run.peak_kind, run.peak_mem_gib))
    return row if plain is None else replace(row, **plain.columns("eager", run.peak_kind, run.peak_mem_gib))


def _explanation(run: PublishedRun, row: PeakRow, tried: Sequence[tuple[str, ExecutedSizes]]) -> str:
    """Returns the first cause with which the error is at most 5 %; else the one that comes nearest, as a part."""
    errors = [(sizes.error(run.peak_kind, run.peak_mem_gib or 0), words) for words, sizes in tried]
    if close := [f"{error:+.1%} {words}" for error, words in errors if abs(error) <= CLOSE]:
        return close[0]
    error, words = min(errors, key=lambda pair: abs(pair[0]), default=(float("inf"), ""))
    return f"{PART}{error:+.1%} {words}" if abs(error) < abs(float(row.error_percent)) / 100 else NONE
