"""`zerobench prune`: removes runs that no table needs (superseded, failed, outdated, leftovers: folder_contents.py)."""

from __future__ import annotations

import shutil
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from ..host.pipes import print_line, print_note
from ..host.temporary import PRUNED, is_claimed
from ..host.terminal import print_on, stdout_console
from ..results.folders import PARTIAL
from ..results.grid import Grid
from ..results.options import Parser, verb
from ..sizes import show_bytes, show_count
from .folder_contents import FolderContents, look, stored_bytes


@dataclass(frozen=True)
class Doomed:
    """An entry to remove: a run's or leftover's folder, or a search's file."""

    path: Path
    why: str
    size: int
    changed: int
    """Time of change, in ns, to detect a replacement."""


@verb
def prune(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, 1 if something could not be removed, 2 if removal is refused."""
    parser = Parser(
        "zerobench prune",
        "Removes superseded and failed runs, leftovers of dead processes and damaged searches. Runs that are being "
        "written, other files and linked folders stay. It asks for confirmation; without a terminal it removes "
        "nothing unless --yes is given.",
    )
    parser.add_argument("results", nargs="?", type=Path, default="results/runs", help="default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="show what would go, and remove nothing")
    older_code_help = "also ok runs by older code, if their cell has an ok run by newer code"
    parser.add_argument("--older-code", action="store_true", help=older_code_help)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    chosen = parser.parse_args(arguments)
    held = look(chosen.results)
    if (held.where / "run.json").is_file():
        raise ValueError(f"{held.where} is one run; name the results folder that it is in")
    if (held.where / "runs.parquet").is_file():
        raise ValueError(f"{held.where} is a collection, one file for all runs: there is nothing to prune in it")
    doomed, console = choose(held, chosen.older_code), stdout_console()
    if doomed:
        rows = [[entry.path.name, entry.why, show_bytes(entry.size)] for entry in doomed]
        console.print(Grid(["to be removed", "why", "size"], rows, left=2))
        print_on(console, f"{len(doomed)} to be removed, {show_bytes(sum(entry.size for entry in doomed))}")
    outdated = held.verdicts().count("outdated")
    if outdated and not chosen.older_code:
        print_on(console, f"{show_count(outdated, 'ok run')} by older code kept; --older-code removes these too")
    for complaint in held.unreadable:
        print_on(console, f"kept: {complaint}")
    if chosen.dry_run or not doomed:
        print("nothing was removed" if doomed else "nothing to prune")
        return 0
    if not chosen.yes and not sys.stdin.isatty():
        raise ValueError("there is no terminal to ask on; add --yes to remove these")
    if not chosen.yes:
        try:
            answer = input("remove them? [y/N] ").strip().lower()
        except (EOFError, KeyboardInterrupt):
            print()
            answer = ""
        if answer not in ("y", "yes"):
            print("nothing was removed")
            return 0
    freed, gone, failed = 0, 0, 0
    for entry in doomed:
        try:
            if remove(entry):
                freed, gone = freed + entry.size, gone + 1
        except OSError as error:
            failed += 1
            print_note(f"zerobench prune: {entry.path} cannot be removed: {error}")
    print_line(f"removed {gone} of {len(doomed)}, {show_bytes(freed)}")
    return int(failed > 0)


def choose(held: FolderContents, older_code: bool) -> list[Doomed]:
    """Returns the entries to remove. Runs behind a link stay: they belong to another folder."""
    unwanted = {"superseded", "failed"} | ({"outdated"} if older_code else set())
    entries = []
    for run, verdict in zip(held.runs, held.verdicts(), strict=True):
        if run.folder is not None and verdict in unwanted and not run.folder.is_symlink():
            reason = {"failed": run.row.status, "outdated": "by older code"}.get(verdict, verdict)
            entries.append((run.folder, reason))
    entries += [(path, "left by a dead process") for path in held.leftovers]
    entries += [(path, "damaged search") for path in held.damaged_searches]
    return [Doomed(path, why, stored_bytes(path), path.stat().st_mtime_ns) for path, why in entries]


def remove(entry: Doomed) -> bool:
    """Removes a folder or file; a reader sees all of it or none. Returns False if it is gone, was replaced, or is
    claimed.
    """
    hidden = entry.path.parent / f"{PRUNED}{uuid.uuid4().hex[:8]}"
    try:
        if entry.path.stat().st_mtime_ns != entry.changed:  # a new run may have the name of one that was removed
            return False
        if entry.path.name.startswith(PARTIAL) and is_claimed(entry.path):
            return False
        entry.path.rename(hidden)
    except FileNotFoundError:
        return False
    if hidden.is_dir():
        shutil.rmtree(hidden)
    else:
        hidden.unlink()
    return True
