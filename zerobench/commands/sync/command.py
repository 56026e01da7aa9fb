"""`zerobench sync`: its command line, its progress, and its account of what was merged."""

from __future__ import annotations

import argparse
import errno
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...host.terminal import progress_console, stdout_console
from ...results.folders import PARTIAL, turn
from ...results.grid import Grid
from ...results.options import Parser
from ...results.rescue import why_unwritable
from ...results.tables import collections_in, run_folders
from ...sizes import printable, show_count
from .merge import COPY, LEFT_OUT, THERE, Item, Merge

DESCRIPTION = """\
Merges results folders: what FROM holds and TO has not is copied into TO. FROM stays as it is, and nothing in TO is
removed or replaced, so that it can be done again at any time, in any order, and while sweeps write to either.

Runs are told apart by what is in them. An equal one is not copied, whatever it is called. Another of the same name
gets the number of the next attempt, in its row, in its collection's tables and in the searches that name it; it then
counts as a later attempt at its cell. Collections (`zerobench export --format parquet`) bring the runs that TO lacks.
What is still being written, damaged runs, links, hidden and other files, and folders in FROM that hold runs of their
own are left out.

Each run is there whole or not at all: after an interruption the same command goes on. The folders are paths, as
`rsync a/ b/` takes them: of another machine copy or mount them first (rsync -a HOST:results/runs/ there/)."""

EXAMPLES = """\
examples:
  zerobench sync /mnt/cluster/runs results/runs          the cluster's runs beside those of this machine
  zerobench sync cluster1/runs cluster2/runs merged      two into a third
  zerobench sync --both here there                       afterwards both have all
  zerobench sync /mnt/cluster/runs results/runs --dry-run

Exit code: 0; 1 something was left out that should be there; 2 no such folder, or it cannot be written to;
130 interrupted."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors after which no further item can be copied either."""


def sync(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, 1 where something was left out, 2 where a folder cannot be merged, 130
    where the user interrupted.
    """
    chosen = _parser().parse_args(arguments)
    pairs = [(source, chosen.to) for source in chosen.source]
    pairs += [(chosen.to, source) for source in chosen.source] if chosen.both else []
    problem = next((words for pair in pairs if (words := problem_of(*pair, chosen.both))), "")
    if not problem and not chosen.dry_run:
        targets = dict.fromkeys(target for _, target in pairs)
        unwritable = [(target, why) for target in targets if (why := why_unwritable(target))]
        problem = "".join(f"{target}: it cannot be written to ({why})" for target, why in unwritable[:1])
    if problem:
        print(printable(f"zerobench sync: {problem}"), file=sys.stderr)
        return 2
    return max(_merge(*pair, chosen.dry_run) for pair in pairs)


def problem_of(source: Path, target: Path, both: bool = False) -> str:
    """Says why one folder cannot be merged into another; empty where it can."""
    if not source.is_dir():
        if both and not source.exists():
            return ""
        if ":" in str(source) and not source.exists():
            return (
                f"{source}: there is no such folder; a folder of another machine is copied (rsync -a) or mounted first"
            )
        return f"{source}: there is no such results folder"
    if target.exists() and not target.is_dir():
        return f"{target}: it is no folder"
    if target.exists() and target.samefile(source):
        return f"{source} and {target} are one folder"
    for name, kind in (("run.json", "one run"), ("runs.parquet", "a collection")):
        if (target / name).is_file():
            return f"{target} is {kind}; name the results folder that it is in"
    if not both and not any(_holds(source)):
        inner = [path.name for path in sorted(source.iterdir()) if path.is_dir() and any(_holds(path))]
        more = f"; {', '.join(inner[:3])} in it does: zerobench sync {source / inner[0]} {target}" if inner else ""
        return f"{source} holds no run, collection or search{more}"
    return ""


def _holds(folder: Path) -> Iterator[Path]:
    yield from run_folders(folder)
    yield from collections_in(folder)
    yield from (folder / "searches").glob("*.json")


def _merge(source: Path, target: Path, dry_run: bool) -> int:
    """Merges one folder into another, and says what was done. Returns an exit code."""
    if not source.is_dir():  # the other half of --both, of a folder that a dry run did not make
        return 0
    done: list[Item] = []
    try:
        with nullcontext() if dry_run else turn(target, "sync", partial(_tell_of_wait, target)):
            merge = Merge(source, target)
            items = _planned(merge)
            if dry_run:
                done = items
            else:
                _copy(merge, items, done)
    except KeyboardInterrupt:
        print(printable(f"{_summary(source, target, done, dry_run)}; interrupted: the same command goes on"))
        return 130
    _tell(source, target, done, dry_run)
    return int(any(item.what == LEFT_OUT for item in done))


def _planned(merge: Merge) -> list[Item]:
    items = []
    with _progress("compare", len(list(_holds(merge.source)))) as advance:
        for item in merge.plan():
            items.append(item)
            advance()
    return items


def _copy(merge: Merge, items: list[Item], done: list[Item]) -> None:
    done += [item for item in items if item.what != COPY]
    full = ""
    with _progress("copy", len(items) - len(done)) as advance:
        for item in items:
            if item.what != COPY:
                continue
            try:
                done.append(merge.copy(item) if not full else item.without(full))
            except (OSError, ValueError) as error:  # removed or damaged meanwhile, or the disk is full
                why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
                done.append(item.without(why))
                full = why if isinstance(error, OSError) and error.errno in FULL else ""
            advance()


def _tell_of_wait(target: Path, waits: bool) -> None:
    if waits:
        print(printable(f"another process merges into {target}; waiting for it"), file=sys.stderr)


@contextmanager
def _progress(words: str, total: int) -> Iterator[Callable[[], None]]:
    columns = (TextColumn(words), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress_console(), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def _tell(source: Path, target: Path, done: list[Item], dry_run: bool) -> None:
    """Prints what was or would be copied under another name or left out, for a dry run all; then the sums."""
    console = stdout_console()
    rows = [
        [item.kind, item.name, item.to or item.what]
        for item in done
        if (dry_run and item.what != THERE) or item.renamed
    ]
    if rows:
        console.print(Grid(["", f"in {printable(source)}", f"in {printable(target)}"], rows, left=3))
    for item in done:
        if item.what == LEFT_OUT:
            why = printable(f"left out: {item.kind} {item.name}: {item.why}")
            console.print(why, markup=False, highlight=False, soft_wrap=True)
    words = _summary(source, target, done, dry_run)
    console.print(printable(words), markup=False, highlight=False, soft_wrap=True)


def _summary(source: Path, target: Path, done: list[Item], dry_run: bool) -> str:
    """Returns a sentence with all counts."""
    copied = Counter(item.kind for item in done if item.what == COPY)
    there, out = (sum(item.what == what for item in done) for what in (THERE, LEFT_OUT))
    renamed = sum(item.renamed for item in done)
    unfinished = len(list(source.glob(f"{PARTIAL}*")))
    kinds = {"run": "runs", "collection": "collections", "search": "searches"}
    parts = [f"{count} {kind if count == 1 else kinds[kind]}" for kind, count in copied.items()]
    words = f"{source} -> {target}: {', '.join(parts) or 'nothing'} {'to copy' if dry_run else 'copied'}"
    words += f", {renamed} of them under another name" * (renamed > 0)
    words += f"; {there} there already" * (there > 0)
    words += f"; {out} left out" * (out > 0)
    return words + f"; {show_count(unfinished, 'run')} in it not finished" * (unfinished > 0)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("zerobench sync", None, DESCRIPTION, EXAMPLES, formatter_class=raw)
    parser.add_argument("source", nargs="+", type=Path, metavar="FROM", help="results folders, runs or collections")
    parser.add_argument("to", type=Path, metavar="TO", help="a results folder; it is made where it does not exist")
    parser.add_argument("--both", action="store_true", help="then also from TO to FROM: both hold the same afterwards")
    parser.add_argument("--dry-run", action="store_true", help="show what would be copied, and copy nothing")
    return parser
