"""A run from start to end: a cell is checked, reused from an earlier run or run in its passes, and written.

A cell already measured with the same code, torch and device class is reused, not run again.
"""

from __future__ import annotations

import json
import shutil
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from glob import escape
from pathlib import Path
from typing import Any

from ..config.cell import Cell, CellConfig
from ..host import job
from ..host.environment import SIMULATED, OtherProcesses
from ..host.files import read_text
from ..predict.estimate import activations_depend_on, simulated_ranks
from ..probes import allocator, probe, snapshot
from ..rank_record import RankRecord
from ..ranks.over_cluster import interruption, launch, places
from ..ranks.start_ranks import LaunchError
from ..records import RunRow
from ..results import folders, provenance, selection, tables
from ..results.folders import Unwritten
from ..simulation.execute import execute
from ..worker import RankJob, run_rank
from . import aggregate

Progress = Callable[[dict[str, Any]], None]


class StoppedError(KeyboardInterrupt):
    """Raised if the user interrupted; the run's row is written."""

    def __init__(self, row: RunRow) -> None:
        super().__init__()
        self.row = row


def find_or_run(
    cell: Cell,
    on_progress: Progress,
    statuses: Sequence[str] = ("ok",),
    on_wait: Callable[[bool], None] = lambda _: None,
    on_unwritten: Callable[[Unwritten], None] = lambda _: None,
) -> tuple[RunRow, bool]:
    """Returns the row of a launch, and whether it was reused. Waits if another sweep is measuring the same launch."""
    with ExitStack() as held:
        if not cell.problems and not cell.config.rerun:
            turn = folders.turn(Path(cell.config.results_dir), f"{run_prefix(cell)} {cell.repeat}", on_wait)
            held.enter_context(turn)
        reusable = find_reusable(cell, statuses)
        return reusable or run_cell(cell, on_progress, on_unwritten), reusable is not None


def run_cell(cell: Cell, on_progress: Progress, on_unwritten: Callable[[Unwritten], None] = lambda _: None) -> RunRow:
    """Runs a cell and always returns a row. Raises StoppedError on Ctrl-C. An invalid cell is not a run: it has a row,
    but no folder.

    `on_unwritten`: called for a run that could not be written to its results folder.
    """
    row = new_row(cell)
    if cell.problems:
        row.status, row.reason = "invalid", "; ".join(cell.problems)
        return row
    interrupts: list[KeyboardInterrupt] = []

    def fill(folder: Path) -> dict[str, list[Any]]:
        begun = time.monotonic()
        tables_of_run: dict[str, list[Any]] = {}
        try:
            records = _run_passes(cell, folder, on_progress, row)
            tables_of_run = aggregate.join(row, cell.config, records)
            row.reason = "" if row.backend == SIMULATED else aggregate.divergence(records)
            row.status = "diverged" if row.reason else "ok"
        except LaunchError as error:
            row.status, row.reason = error.status, error.reason
        except KeyboardInterrupt as stop:
            row.status, row.reason = "interrupted", str(stop) or interruption()
            interrupts.append(stop)
        except Exception as error:  # an error of this process: the sweep goes on, and the row has the reason
            row.status, row.reason = "crash", f"the harness raised {type(error).__name__}: {error}"
            tables_of_run = {}
            _write_log(folder, "harness.log", traceback.format_exc())
        row.seconds = round(time.monotonic() - begun, 3)
        return tables_of_run

    _write_run(cell, row, fill, on_unwritten)
    if interrupts:
        raise StoppedError(row) from interrupts[0]
    return row


def write_lost(cell: Cell, reason: str, launcher: str, log: str, on_unwritten: Callable[[Unwritten], None]) -> RunRow:
    """Writes the row of a launch whose job left none, with the job's `log`."""
    row = new_row(cell)
    row.run_id, row.status, row.reason, row.launcher = run_prefix(cell), "crash", reason, launcher

    def fill(folder: Path) -> dict[str, list[Any]]:
        _write_log(folder, "job.log", log)
        return {}

    _write_run(cell, row, fill, on_unwritten)
    return row


def _write_run(
    cell: Cell, row: RunRow, fill: Callable[[Path], dict[str, list[Any]]], on_unwritten: Callable[[Unwritten], None]
) -> None:
    """Has `fill` fill a folder and `row`, and writes the row with the tables that it returns."""
    prefix, results_dir = run_prefix(cell), Path(cell.config.results_dir)
    try:
        aside = folders.claim_or_rescue(results_dir, prefix)
    except Exception as error:
        row.run_id, row.status = prefix, "crash"
        row.reason = row.reason or f"no folder can be made for it: {error}"
        on_unwritten(Unwritten(results_dir, folders.short_reason(error), None))
        return
    written = fill(aside.path)
    lost = folders.write_or_rescue(
        aside, results_dir, prefix, row, cell.config, provenance.provenance(cell.config), written
    )
    if lost is not None:
        on_unwritten(lost)


def _write_log(folder: Path, name: str, text: str) -> None:
    with suppress(OSError):  # the row's reason has the essentials
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "logs" / name).write_text(text)


def pass_names(config: CellConfig, repeat: int = 0) -> tuple[str, ...]:
    """Returns the passes of a cell's launch, in order. A simulated world has no times and no losses: it is accounted
    only.
    """
    wanted = "accounted" if config.backend == SIMULATED else config.measure.passes
    if wanted == "both_once":
        wanted = "timed" if repeat else "both"
    passes = ("timed", "accounted") if wanted == "both" else (wanted,)
    return (*passes, "traced") if config.measure.trace else passes


def _run_passes(cell: Cell, aside: Path, on_progress: Progress, row: RunRow) -> list[RankRecord]:
    """Returns the records of all passes; sets the row's CPU load by others when timed. Raises LaunchError, whose reason
    names the pass.
    """
    records: list[RankRecord] = []
    if cell.config.device == "cpu":
        allocator.hook_library()  # compiled once, before many ranks ask for it
    predicted = activations_depend_on(cell.config)
    ranks = ranks_to_run(cell.config)
    for mode in pass_names(cell.config, row.repeat):
        meeting = places(len(ranks), aside / f"rendezvous-{mode}")
        folder = str(aside.resolve())
        size = _own_activation_bytes.get(predicted)
        jobs = [
            RankJob(cell.config, mode, rank, point, folder, size) for rank, point in zip(ranks, meeting, strict=True)
        ]
        others = OtherProcesses()
        try:
            records += launch(run_rank, jobs, aside / "logs" / mode, cell.config.launch.timeout_s, on_progress)
        except LaunchError as error:
            shown = "".join(f"; the allocator then: {name}" for name in snapshot.written(aside)[:1])
            error.reason = f"{mode} pass: {error.reason}{shown}"
            raise
        finally:
            if mode == "timed" and job.current_job() is None:  # ranks of a joined job are no processes of this one
                row.others_cores = others.cores()
            (aside / f"rendezvous-{mode}").unlink(missing_ok=True)
            shutil.rmtree(aside / probe.SAVES, ignore_errors=True)
    sizes = (record.own_activation_bytes for record in records)
    _own_activation_bytes.update((predicted, size) for size in sizes if size is not None)
    return records


_own_activation_bytes: dict[str, int] = {}
"""Cache of predictions in this process, by what they depend on: each takes a forward and a backward."""


def ranks_to_run(config: CellConfig) -> Sequence[int]:
    """Returns the ranks to run: all, or of a simulated world the one that has the peak."""
    if config.backend != SIMULATED:
        return range(config.world_size)
    ranks = simulated_ranks(config)
    return ranks if len(ranks) == 1 else [execute(config).rank]


def moment(since_epoch: float) -> str:
    """Returns a time in the format of the column `started`."""
    return datetime.fromtimestamp(since_epoch, UTC).isoformat(timespec="milliseconds")


def new_row(cell: Cell) -> RunRow:
    """Returns the row of a launch that has not run: the cell's settings, where it comes from, and nothing measured."""
    config = cell.config
    row = aggregate.blank_row(config, provenance.provenance(config), moment(time.time()), cell.repeat)
    row.checkpointing = config.model.checkpoints if config.model.can_checkpoint else None
    row.systems, row.alloc_conf = config.systems_label, provenance.alloc_conf(config.device)
    row.ranks_per_gpu = config.ranks_per_gpu if config.device == "cuda" else None
    row.launcher = job.launcher()
    return row


LONGEST_NAME = 80
"""Maximum length of a model's name in the name of a run's folder; file systems permit 255 characters in total."""


def find_reusable(cell: Cell, statuses: Sequence[str] = ("ok",)) -> RunRow | None:
    """Returns the row of an earlier run of this launch, with this code and torch on this device class, or None."""
    return _newest(cell, run_prefix(cell), statuses, lambda run: (selection.split(run[0].name), run[1].started))


def find_elsewhere(cell: Cell, statuses: Sequence[str], launcher: str) -> RunRow | None:
    """Returns the row of an earlier run by this launcher with the same cell, code and packages, or None.

    The device class is ignored, since it belongs to the launcher's machines and is unknown here.
    """
    names = provenance.packages_of(cell.config)

    def is_wanted(folder: Path, row: RunRow) -> bool:
        same = (row.launcher, row.source_hash) == (launcher, provenance.source_of(cell.config))
        return same and recorded_versions(folder, names) == provenance.versions(names)

    return _newest(cell, _cell_prefix(cell), statuses, lambda run: run[1].started, is_wanted)


def recorded_versions(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Returns the versions of packages that a run has recorded; {} if they cannot be read."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        recorded = json.loads(read_text(folder / "provenance.json"))["versions"]
        return {name: recorded[name] or "not installed" for name in names}
    return {}


def _newest(
    cell: Cell,
    prefix: str,
    statuses: Sequence[str],
    key: Callable[[tuple[Path, RunRow]], Any],
    is_wanted: Callable[[Path, RunRow], bool] = lambda folder, row: True,
) -> RunRow | None:
    """Returns the last row, by `key`, of complete runs whose names begin with `prefix`, or None."""
    results_dir = Path(cell.config.results_dir)
    if cell.problems or cell.config.rerun or not results_dir.is_dir():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # runs that are unreadable, or being removed, are not reused
        rows = ((folder, tables.read_row(folder)) for folder in results_dir.glob(f"{escape(prefix)}-*"))
        candidates = [(folder, row) for folder, row in rows if row is not None and is_wanted(folder, row)]
        candidates = [run for run in candidates if run[1].status in statuses and run[1].repeat == cell.repeat]
        newest = sorted(candidates, key=key, reverse=True)
        return next((row for folder, row in newest if tables.is_whole(folder)), None)


def run_prefix(cell: Cell) -> str:
    """Returns the prefix of a cell's run names: cell, code, torch, device class; results/selection.py has the rest."""
    return f"{_cell_prefix(cell)}-{provenance.environment_hash(cell.config)}"


def _cell_prefix(cell: Cell) -> str:
    config = cell.config
    return f"{config.strategy.name}-{config.model_name[:LONGEST_NAME]}-n{config.world_size}-{cell.cell_id}"
