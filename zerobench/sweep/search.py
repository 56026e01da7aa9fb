"""Searches for micro-batch x accumulation x checkpointing under a memory limit, by measurement, not by formula.

A *search* is a cell with `search.memory_limit`: strategy, model and `batch` are given, the rest is searched. Its
*combinations* split a rank's batch into equal micro-batches, with and without recomputing blocks.

1. Each combination runs as an ordinary cell, the smallest micro-batch first, until one does not fit, since larger ones
   need more. The combination without accumulation is always tried, because DDP needs less memory there: its no_sync
   keeps another set of gradients. A combination fits if the peak of the rank that uses most is within the limit;
   running out of memory counts as not fitting.
2. The *finalists*, combinations within a tenth of the fastest, are measured again, longer, all strategies interleaved.
   If none of them fits then, the next fastest are finalists.
3. The fastest finalist is the result; if nothing fits, that is the result, with the smallest memory that is needed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from ..config.cell import Cell
from ..host.job import report_row
from ..records import RunRow, SearchRow
from ..results.folders import Unwritten, short_reason, write_search
from ..results.frames import frame_of
from ..results.provenance import device_class
from ..results.summary import summarize
from ..sections import known
from ..sizes import parse_memory, show_bytes
from .sweep import Sweep

FINALISTS_WITHIN = 0.9
"""Minimum relative throughput of a finalist; a short run is no more precise."""


@dataclass
class BatchSearch:
    """One search. `tried`: combinations, as cells for a longer measurement, with the rows that count for them."""

    cell: Cell
    tried: list[tuple[Cell, RunRow]] = field(default_factory=list)
    confirmed: list[RunRow] = field(default_factory=list)

    @property
    def identity(self) -> str:
        choices = {k: v for k, v in self.cell.config.search.values().items() if k != "memory_limit"}
        return f"{self.cell.cell_id} {json.dumps(choices, sort_keys=True)}"

    @property
    def limit_bytes(self) -> int:
        return parse_memory(known(self.cell.config.search.memory_limit))

    def fits(self, row: Any) -> bool:
        """Whether a run, or a summarized row of several, is within the limit."""
        return row.status == "ok" and used_bytes(row) <= self.limit_bytes

    def finalists(self) -> list[Cell]:
        """Returns the combinations that fit and are about as fast as the fastest; none once a longer run fits."""
        fitting = [(cell, row, known(row.tokens_per_s)) for cell, row in self.tried if self.fits(row)]
        if any(row in self.confirmed for _, row, _ in fitting):
            return []
        best = max((speed for _, _, speed in fitting), default=0.0)
        return [cell for cell, _, speed in fitting if speed >= FINALISTS_WITHIN * best]

    def confirm(self, rows: list[RunRow]) -> None:
        """Takes longer launches of its combinations, also of other searches; one that does not fit takes precedence."""
        ids = {cell.cell_id for cell, _ in self.tried}
        self.confirmed += [row for row in rows if row.cell_id in ids]
        longer = {row.cell_id: row for row in sorted(self.confirmed, key=self.fits, reverse=True)}
        self.tried = [(cell, longer.get(cell.cell_id, row)) for cell, row in self.tried]


def is_search(cell: Cell) -> bool:
    """Whether this cell is a search."""
    return cell.config.search.memory_limit is not None and not cell.problems


def combinations(cell: Cell) -> list[list[Cell]]:
    """Returns a list of combinations for each choice of recomputing, the smallest micro-batch first."""
    config = cell.config
    share = config.batch // config.world_size
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    choices = config.search.checkpointing if config.model.can_checkpoint else [None]
    retry = [status for status in config.launch.retry if status != "oom"]  # not fitting is an answer here
    alone = cell.changed(
        search=replace(config.search, memory_limit=None), measure=replace(config.measure, repeats=1), fail_fast=False,
        launch=replace(config.launch, retry=retry),
    )  # fmt: skip
    ladders = []
    for choice in choices:
        model = config.model if choice is None else replace(config.model, checkpointing=choice)  # type: ignore[call-arg]
        sized = [{"micro_batch": size, "accumulation": share // size} for size in sizes]
        ladders.append([alone.changed(model=model, **changes) for changes in sized])
    return ladders


def used_bytes(row: Any) -> int:
    """Returns the bytes that the limit applies to: on CUDA the allocator's reserved bytes, else the ledger's peak."""
    return int(row.peak_bytes if pd.isna(row.reserved_bytes) else row.reserved_bytes)


def run_searches(cells: list[Cell], sweep: Sweep) -> list[SearchRow]:
    """Runs the searches one after the other, then all their finalists together. Returns [] if the user stops it."""
    searches = [BatchSearch(cell) for cell in cells]
    rows: dict[str, RunRow] = {}
    for search in searches:
        for ladder in combinations(search.cell):
            _climb(search, ladder, sweep, rows)
    if sweep.stopped:
        return []
    while final := {(c.cell_id, c.config.measure.repeats): c for search in searches for c in search.finalists()}:
        before = len(sweep.rows)
        sweep.run(list(final.values()), first=1)  # without the short run, whose selection is biased by luck
        if sweep.stopped:
            return []
        for search in searches:
            search.confirm(sweep.rows[before:])
    concluded = [_conclude(search) for search in searches]
    for search, row in zip(searches, concluded, strict=True):
        results_dir = Path(search.cell.config.results_dir)
        report_row(vars(row))
        try:
            write_search(results_dir, row)
        except Exception as error:
            sweep.unwritten.append(Unwritten(results_dir, short_reason(error), None))
    return concluded


def _climb(search: BatchSearch, ladder: list[Cell], sweep: Sweep, rows: dict[str, RunRow]) -> None:
    """Runs combinations until one does not fit, then only the last one. `rows`: cell id -> row, of all searches."""
    too_large, wanted = False, search.cell.config.search
    for cell in ladder:
        if too_large and cell is not ladder[-1]:
            continue
        if cell.cell_id not in rows:
            before = len(sweep.rows)
            sweep.run([cell])
            if sweep.stopped:
                return
            rows[cell.cell_id] = sweep.rows[before]
        row = rows[cell.cell_id]
        longer = replace(cell.config.measure, steps=wanted.steps, repeats=wanted.repeats)
        search.tried.append((cell.changed(measure=longer), row))
        too_large = too_large or not search.fits(row)


def _conclude(search: BatchSearch) -> SearchRow:
    """Builds the result."""
    config, confirmed = search.cell.config, search.confirmed
    peaks = [used_bytes(row) for _, row in search.tried if row.status == "ok"]
    identity = f"{search.identity} {search.limit_bytes} {device_class(config.device)}"
    row = SearchRow(
        search_id=hashlib.sha256(identity.encode()).hexdigest()[:12], strategy=config.strategy.name,
        model=config.model_name, world_size=config.world_size, batch=config.batch, sequence=config.sequence,
        device=config.device, limit_bytes=search.limit_bytes, status="", reason="", tried=len(search.tried),
        least_bytes=min(peaks, default=None), run_ids="", precision=config.precision.label,
        optimizer=config.optimizer_label,
    )  # fmt: skip
    cells: list[Any] = [*summarize(frame_of(confirmed, RunRow)).itertuples()] if confirmed else []
    fitting = [cell for cell in cells if search.fits(cell)]
    if not fitting:
        row.status, lost = "nothing_fits", [run for run in confirmed if run.status != "ok"]
        if lost:
            row.reason = f"no combination that fits could be confirmed: {lost[0].status}: {lost[0].reason}"
        elif row.least_bytes is not None:
            row.reason = f"needs at least {show_bytes(row.least_bytes)}, and the limit is {show_bytes(row.limit_bytes)}"
        else:
            row.reason = "; ".join(dict.fromkeys(f"{run.status}: {run.reason}" for _, run in search.tried))
        return row
    best = max(fitting, key=lambda cell: cell.tokens_per_s)
    row.status = "found"
    row.run_ids = " ".join(run.run_id for run in confirmed if run.cell_id == best.cell_id)
    row.micro_batch, row.accumulation = int(best.micro_batch), int(best.accumulation)
    row.checkpointing = None if pd.isna(best.checkpointing) else bool(best.checkpointing)
    row.peak_bytes, row.tokens_per_s = used_bytes(best), float(best.tokens_per_s)
    row.tokens_per_s_low, row.tokens_per_s_high = best.tokens_per_s_low, best.tokens_per_s_high
    return row
