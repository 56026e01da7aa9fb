"""The table of `zerobench status`: the contents of a results folder or a collection, and suggested next commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ..host.terminal import is_quiet, print_on, stdout_console
from ..records import RunRow
from ..results.folders import PARTIAL
from ..results.frames import frame_of
from ..results.grid import Grid
from ..results.options import RESULTS, STATUS, Where
from ..results.printed_table import sorted_cells
from ..results.selection import matching
from ..sizes import show_bytes, show_count, show_ms
from .folder_contents import FolderContents, code_of, size_of

FIRST_TO_GO = ("code", "ago", "step", "peak")


def only(held: FolderContents, where: list[Where]) -> FolderContents:
    """Keeps only the runs that meet the conditions."""
    runs = frame_of([run.row for run in held.runs], RunRow)
    kept = set(matching(runs, where)["run_id"])
    return replace(held, runs=[run for run in held.runs if run.row["run_id"] in kept]) if where else held


def print_status(held: FolderContents, chosen: Sequence[str] | None = None) -> None:
    """Prints counts, the table with the columns `chosen`, the runs in progress, and suggested next steps."""
    console = stdout_console()
    cells = sorted_cells([run.row for run in held.runs]) if held.runs else []
    by_status = Counter(run.row["status"] for run in held.runs)
    statuses = ", ".join(f"{number} {name}" for name, number in sorted(by_status.items(), key=lambda s: s[0] != "ok"))
    size = sum(size_of(run.folder) for run in held.runs if run.folder) + sum(map(size_of, held.collections))
    counts = f"{held.where}: {show_count(len(held.runs), 'run')} of {show_count(len(cells), 'cell')}"
    superseded = held.verdicts().count("superseded")
    notes = [statuses] if statuses else []
    notes += [f"{superseded} superseded"] if superseded else []
    lines = ["; ".join([": ".join([counts, *notes[:1]]), *notes[1:], f"{show_bytes(size)} on disk"])]
    if cells:
        console.print(Grid(STATUS, [_line(cell) for cell in cells], 2, FIRST_TO_GO, chosen))
    lines += [f"being written now: {path.name.removeprefix(PARTIAL).rsplit('-', 1)[0]}" for path in held.writing]
    if held.leftovers:
        size = sum(size_of(path) for path in held.leftovers)
        lines.append(f"{show_count(len(held.leftovers), 'leftover')} of dead processes, {show_bytes(size)}")
    lines += [f"unreadable: {complaint}" for complaint in held.unreadable]
    for line in lines + ([] if is_quiet() else next_steps(held, cells)):
        print_on(console, line)


def next_steps(held: FolderContents, cells: list[dict[str, Any]]) -> list[str]:
    """Returns suggestions, each with a command."""
    where = "" if str(held.where) == RESULTS else f" {held.where}"
    verdicts = held.verdicts()
    own = [verdict for run, verdict in zip(held.runs, verdicts, strict=True) if run.folder is not None]
    there = where and f" --results{where}"
    steps = []
    if not held.runs:
        inside = [p.name for p in sorted(held.where.glob("*/")) if any(p.glob("*/run.json"))]
        hint = f"`zerobench status {held.where / inside[0]}`" if inside else "`zerobench experiment=stages` makes some"
        return [f"no runs here; {hint}"]
    if failed := verdicts.count("failed"):
        removes = f"; `zerobench prune{where}` removes them" if "failed" in own else ""
        steps.append(f"{show_count(failed, 'failed run')}: `zerobench show RUN{there}` shows why{removes}")
    if "superseded" in own or held.leftovers:
        steps.append(f"`zerobench prune{where}` removes superseded runs and leftovers")
    if older := sum(code_of(cell) == "older" for cell in cells):
        steps.append(f"{show_count(older, 'cell')} by older code: the same sweep again measures them again")
    return steps or [f"`zerobench export{where}` writes these as tables"]


def _line(cell: dict[str, Any]) -> list[str]:
    state = cell["status"] + (f" ×{cell['launches']}" if cell["launches"] > 1 else "")
    figures = ["–", "–"]
    if cell["status"] == "ok":
        figures = [show_bytes(cell["peak_bytes"]), show_ms(cell["step_s"])]
    return [cell["name"], state, _ago(cell["started"]), code_of(cell), *figures]


def _ago(started: str) -> str:
    seconds = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(started)).total_seconds())
    units = {"d": 86400, "h": 3600, "min": 60, "s": 1}
    return next(f"{seconds / size:.0f} {unit}" for unit, size in units.items() if seconds >= size or unit == "s")
