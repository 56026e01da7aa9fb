"""The life of a run: a cell is checked, perhaps found measured already, else run in two passes and written down."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import join, provenance, tables
from .launch import Interrupted, launch
from .records import RunRow
from .resolve import Cell
from .worker import RankJob, RankRecord, run_rank

PASS_ORDER = ("timed", "accounted")

Progress = Callable[[dict[str, Any]], None]


def find_reusable(cell: Cell) -> dict[str, Any] | None:
    """The row of an ok run of the same cell, code, torch and device class, or None."""
    results_dir = Path(cell.config["results_dir"])
    if cell.problems or cell.config["rerun"] or not results_dir.is_dir():
        return None
    for folder in sorted(results_dir.glob(f"{_prefix(cell)}-*"), key=lambda f: f.stat().st_mtime, reverse=True):
        row = tables.read_row(folder)
        if row is not None and row["status"] == "ok":
            return row
    return None


def run_cell(cell: Cell, on_progress: Progress) -> RunRow:
    """Runs a cell to its row, whatever happens. Raises Interrupted when the user stops us; the row is written first."""
    prefix = _prefix(cell)
    aside = tables.claim_folder(Path(cell.config["results_dir"]), prefix)
    row = _blank_row(cell)
    begun = time.monotonic()
    records: list[RankRecord] = []
    interrupted: Interrupted | None = None
    if cell.problems:
        row.status, row.reason = "invalid", "; ".join(cell.problems)
    else:
        try:
            row.status, row.reason, records = _run_passes(cell, aside, on_progress)
        except Interrupted as stop:
            row.status, row.reason, interrupted = "interrupted", "stopped by the user", stop
    written: dict[str, list[Any]] = {}
    if row.status == "ok":
        written = join.join(row, cell.config, records)
    row.seconds = round(time.monotonic() - begun, 3)
    tables.write_run(aside, prefix, row, cell.config, provenance.provenance(cell.config), written)
    if interrupted is not None:
        raise interrupted
    return row


def _run_passes(cell: Cell, aside: Path, on_progress: Progress) -> tuple[str, str, list[RankRecord]]:
    records: list[RankRecord] = []
    for mode in PASS_ORDER:
        jobs = [
            RankJob(cell.config, mode, rank, str((aside / f"rendezvous-{mode}").resolve()))
            for rank in range(cell.config["world_size"])
        ]
        outcome = launch(run_rank, jobs, aside / "logs" / mode, cell.config["timeout_s"], on_progress)
        (aside / f"rendezvous-{mode}").unlink(missing_ok=True)
        if outcome.status != "ok":
            return outcome.status, f"{mode} pass: {outcome.reason}", []
        records += outcome.results
    return "ok", "", records


def _prefix(cell: Cell) -> str:
    config = cell.config
    name = f"{config['strategy']['name']}-{config['model']['name']}-n{config['world_size']}"
    return f"{name}-{cell.cell_id}-{provenance.environment_hash(config)}"


def _blank_row(cell: Cell) -> RunRow:
    config = cell.config
    optimizer = config["optimizer"]
    return RunRow(
        run_id="",
        cell_id=cell.cell_id,
        status="",
        reason="",
        strategy=config["strategy"]["name"],
        model=config["model"]["name"],
        world_size=config["world_size"],
        device=config["device"],
        backend=config["backend"],
        precision=config["precision"]["name"],
        optimizer=f"{optimizer['name']}/{optimizer['implementation']}",
        micro_batch=config["micro_batch"],
        batch=config["batch"],
        sequence=config["sequence"],
        seed=config["seed"],
        threads=config["threads"],
        data=config["data"]["name"],
        text_hash=config["data"].get("text_hash"),
        started=datetime.now(UTC).isoformat(timespec="milliseconds"),
        seconds=0.0,
    )
