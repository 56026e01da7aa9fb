"""The contents of a results folder, for the verbs that maintain it.

A run *failed* if its status is not ok. It is *superseded* if an ok run of the same cell, repeat, code, torch and device
began later, and *outdated* if the newest ok run of its cell on the same torch and device is by other code.
*Leftovers*: results/folders.py.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import strategies
from ..config.cell import CellConfig
from ..host.files import read_text
from ..host.terminal import is_quiet, print_on, stdout_console
from ..records import RunRow
from ..registry import DATA, MODELS
from ..results.folders import PARTIAL, abandoned, partials
from ..results.frames import frame_of
from ..results.grid import Grid
from ..results.options import RESULTS, STATUS, Where
from ..results.printed_table import sorted_cells
from ..results.provenance import source_of
from ..results.selection import CODE, Moment, matching, moments, split
from ..results.tables import SEARCHES, collections_in, is_whole, load, read_row, run_folders
from ..sizes import show_bytes, show_count, show_ms


@dataclass(frozen=True)
class RunInFolder:
    """A run: its row, and its folder unless it is in a collection."""

    row: RunRow
    folder: Path | None
    began: Moment


@dataclass(frozen=True)
class FolderContents:
    """`runs`: in the order in which they began. `unreadable`: a message for each run that cannot be read."""

    where: Path
    runs: list[RunInFolder]
    collections: list[Path]
    unreadable: list[str]
    writing: list[Path]
    """Folders into which a living process is writing a run."""
    leftovers: list[Path]
    named: frozenset[str]
    """Runs that a search names as its result."""
    damaged_searches: list[Path]
    every_run: list[RunInFolder]
    """All runs, including those that --where has excluded from `runs`."""

    def verdicts(self) -> list[str]:
        """Returns for each run "superseded", "failed", "outdated", or "" if it should be kept."""
        newest: dict[tuple[Any, ...], Moment] = {}
        code: dict[tuple[Any, ...], str] = {}
        for run in self.every_run:
            if run.row.status == "ok":
                newest[_launch(run.row)] = run.began
                code[_environment(run.row)] = run.row.source_hash

        def verdict(run: RunInFolder) -> str:
            row, ok = run.row, run.row.status == "ok"
            if ok and row.run_id in self.named:
                return ""
            if run.began < newest.get(_launch(row), run.began):
                return "superseded"
            if not ok:
                return "failed"
            return "outdated" if row.source_hash != code[_environment(row)] else ""

        return [verdict(run) for run in self.runs]


def look(where: Path) -> FolderContents:
    """Reads only the rows of a results folder, a run or a collection, and other tables only of runs that replace
    another one. Raises FileNotFoundError if there is no such folder.
    """
    if not where.is_dir():
        raise FileNotFoundError(f"{where}: there is no such results folder; `zerobench experiment=stages` makes one")
    runs: list[RunInFolder] = []
    unreadable: list[str] = []
    with warnings_to(unreadable):
        entries = [(folder, row) for folder in run_folders(where) if (row := read_row(folder)) is not None]
    entries.sort(key=lambda entry: split(entry[1].run_id))
    runs += _held([row for _, row in entries], [folder for folder, _ in entries])
    collections = collections_in(where)
    for collection in collections:
        rows: list[Any] = load(collection).runs.to_dict("records")
        runs += _held([RunRow(**row) for row in rows], [None] * len(rows))
    runs.sort(key=lambda run: run.began)
    with warnings_to(unreadable):
        damaged_runs = _damaged(runs)
    runs = [run for run in runs if run.folder not in damaged_runs]
    leftovers = abandoned(where)
    writing = [path for path in partials(where) if path not in leftovers]
    named, damaged = _read_searches(where / SEARCHES)
    return FolderContents(where, runs, collections, unreadable, writing, leftovers, named, damaged, runs)


@contextmanager
def warnings_to(messages: list[str]) -> Iterator[None]:
    """Adds the messages of the block's warnings to `messages`, instead of printing them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages += [str(warning.message) for warning in caught]


def _damaged(runs: Sequence[RunInFolder]) -> set[Path]:
    """Returns the folders of ok runs that have a damaged table, with a warning each, if these runs would make another
    run of their launch superseded, or one of older code outdated. `runs`: in the order in which they began.
    """
    damaged: set[Path] = set()
    for key, replaced in ((_launch, "run_id"), (_environment, "source_hash")):
        groups: dict[tuple[Any, ...], list[RunInFolder]] = {}
        for run in runs:
            groups.setdefault(key(run.row), []).append(run)
        for group in groups.values():
            for run in reversed([run for run in group if run.row.status == "ok"]):
                if all(getattr(run.row, replaced) == getattr(other.row, replaced) for other in group):
                    break
                if run.folder is None or (run.folder not in damaged and is_whole(run.folder)):
                    break
                damaged.add(run.folder)
    return damaged


def _held(rows: list[RunRow], folders: Sequence[Path | None]) -> list[RunInFolder]:
    began = moments((row.run_id, row.started) for row in rows)
    return [RunInFolder(*fields) for fields in zip(rows, folders, began, strict=True)]


def stored_bytes(path: Path) -> int:
    """Returns the bytes of a file, or of all files below a folder; links are not followed."""
    files = [path] if not path.is_dir() else [Path(at) / name for at, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        with suppress(FileNotFoundError):  # another process removes or finishes this run right now
            total += file.lstat().st_size
    return total


def _launch(row: RunRow) -> tuple[Any, ...]:
    return (row.cell_id, row.repeat, *(getattr(row, name) for name in CODE))


def _environment(row: RunRow) -> tuple[Any, ...]:
    return (row.cell_id, *(getattr(row, name) for name in CODE if name != "source_hash"))


def _read_searches(folder: Path) -> tuple[frozenset[str], list[Path]]:
    """Returns the runs that searches name, and the files that are not searches."""
    named: set[str] = set()
    damaged: list[Path] = []
    if folder.is_symlink():  # not this results folder's own
        return frozenset(), damaged
    for path in sorted(folder.glob("*.json")):
        try:
            named |= set(json.loads(read_text(path))["run_ids"].split())
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            damaged.append(path)
    return frozenset(named), damaged


def code_age(row: dict[str, Any]) -> str:
    """ "current" or "older": whether the code that measured this run is the current code; "?" if unknown."""
    config = CellConfig.from_json(row["config"])
    for registry, name in ((MODELS, config.model.kind), (DATA, config.data.name)):
        if name not in registry.own and name not in registry.all():
            return "?"  # a user's, whose script knows its code: python mine.py status
    if strategies.find(config.strategy.name) is None:
        return "?"
    return "current" if row["source_hash"] == source_of(config) else "older"


FIRST_TO_GO = ("code", "ago", "step", "peak")


def only(held: FolderContents, where: list[Where]) -> FolderContents:
    """Keeps only the runs that meet the conditions."""
    runs = frame_of([run.row for run in held.runs], RunRow)
    kept = set(matching(runs, where)["run_id"])
    return replace(held, runs=[run for run in held.runs if run.row.run_id in kept]) if where else held


def print_status(held: FolderContents, chosen: Sequence[str] | None = None) -> None:
    """Prints counts, the table with the columns `chosen`, the runs in progress, and suggested next steps."""
    console = stdout_console()
    cells = sorted_cells(frame_of([run.row for run in held.runs], RunRow)) if held.runs else []
    by_status = Counter(run.row.status for run in held.runs)
    statuses = ", ".join(f"{number} {name}" for name, number in sorted(by_status.items(), key=lambda s: s[0] != "ok"))
    size = sum(stored_bytes(run.folder) for run in held.runs if run.folder) + sum(map(stored_bytes, held.collections))
    counts = f"{held.where}: {show_count(len(held.runs), 'run')} of {show_count(len(cells), 'cell')}"
    superseded = held.verdicts().count("superseded")
    notes = [statuses] if statuses else []
    notes += [f"{superseded} superseded"] if superseded else []
    lines = ["; ".join([": ".join([counts, *notes[:1]]), *notes[1:], f"{show_bytes(size)} on disk"])]
    if cells:
        console.print(Grid(STATUS, [_line(cell) for cell in cells], 2, FIRST_TO_GO, chosen))
    lines += [f"being written now: {path.name.removeprefix(PARTIAL).rsplit('-', 1)[0]}" for path in held.writing]
    if held.leftovers:
        size = sum(stored_bytes(path) for path in held.leftovers)
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
        removes = f"; `zerobench prune{where}` removes {'it' if failed == 1 else 'them'}" if "failed" in own else ""
        reason = f"`zerobench show RUN{there}` shows why{removes}; the same sweep resumes"
        steps.append(f"{show_count(failed, 'run')} not ok: {reason}")
    if "superseded" in own or held.leftovers:
        steps.append(f"`zerobench prune{where}` removes superseded runs and leftovers")
    if older := sum(code_age(cell) == "older" for cell in cells):
        steps.append(f"{show_count(older, 'cell')} by older code: the same sweep again measures them again")
    return steps or [f"`zerobench export{where}` writes these as tables"]


def _line(cell: dict[str, Any]) -> list[str]:
    state = cell["status"] + (f" ×{cell['launches']}" if cell["launches"] > 1 else "")
    figures = ["–", "–"]
    if cell["status"] == "ok":
        figures = [show_bytes(cell["peak_bytes"]), show_ms(cell["step_s"])]
    seconds = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(cell["started"])).total_seconds())
    units = {"d": 86400, "h": 3600, "min": 60, "s": 1}
    ago = next(f"{seconds / size:.0f} {unit}" for unit, size in units.items() if seconds >= size or unit == "s")
    return [cell["name"], state, ago, code_age(cell), *figures]
