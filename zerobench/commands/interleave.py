"""`zerobench compare --interleave REV_A REV_B -- OVERRIDES`: two git revisions measured in turns, A B B A A B ...

Each revision is checked out in its own worktree and runs unchanged, with its own package and conf/, on this Python and
its packages. A launch is the whole command once, in a new process, so that the revisions do not affect each other.
Turns are mirrored, A B and then B A, so that a linear drift affects both sides equally. Revisions are looked up in the
checkout of zerobench that contains the current folder, or else the one that the running package comes from; `.` is that
checkout with its uncommitted changes.
"""

from __future__ import annotations

import argparse
import glob
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from ..host.pipes import print_note
from ..host.revisions import GitError, full_hash, git, worktree
from ..results import tables
from ..results.provenance import PACKAGE
from ..results.selection import in_order, latest, split

RUNS = "results/runs/interleaved"

LEAST = 2
"""Fewest launches of each revision: a single one is not interleaved."""

OURS = ("measure.repeats", "results_dir", "rerun")
"""Keys that this command sets for every launch."""


def add_interleave(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a comparison that measures."""
    revisions = "instead of A and B: measure two git revisions (. is the checkout as it is) in turns, A B B A; the"
    revisions += " cells follow --, as in -- -m strategy=ddp,zero1"
    parser.add_argument("--interleave", nargs=2, metavar=("REV_A", "REV_B"), help=revisions)
    counted = "with --interleave: launches of each revision (default: %(default)s)"
    parser.add_argument("--launches", type=int, default=6, metavar="K", help=counted)
    where = f"with --interleave: a new folder for the runs (default: one in {RUNS})"
    parser.add_argument("--runs", type=Path, metavar="DIR", help=where)


def split_overrides(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Returns the arguments before `--`, and those after it; None if there is no `--`."""
    if "--" not in arguments:
        return arguments, None
    dashes = arguments.index("--")
    return arguments[:dashes], arguments[dashes + 1 :]


def check_sides(a: str | None, b: str | None, interleave: list[str] | None, overrides: list[str] | None) -> None:
    """Raises ValueError if the sides are not given exactly once."""
    if interleave and (a or b):
        raise ValueError(f"{a}: with --interleave the sides are {' and '.join(interleave)}; leave folders out")
    if interleave and overrides is None:
        raise ValueError("--interleave: give the cells after --, as in -- strategy=zero1 model=gpt_small")
    if not interleave and overrides is not None:
        raise ValueError("--: cells to measure are for --interleave REV_A REV_B; folders have their runs already")
    if not interleave and (a is None or b is None):
        raise ValueError("name two sides, A and B: runs or folders; or --interleave REV_A REV_B -- OVERRIDES")
    given = {override.partition("=")[0].lstrip("+") for override in overrides or []}
    for key in OURS:
        if key in given:
            raise ValueError(f"{key}: --interleave sets it for every launch; use --launches and --runs")


@dataclass(frozen=True)
class Side:
    """Runs of one side, and their table of lines."""

    runs: pd.DataFrame
    lines: pd.DataFrame


def load_side(where: str) -> Side:
    """Returns the runs in a folder, or in all folders that a pattern matches, in the order in which they began. Two
    folders may both have, for example, the first attempt of a cell. If so, only the newest launches in each folder are
    taken, and renumbered as launches of their cell. A run that is in two folders, such as in a copy, counts once.

    Raises FileNotFoundError if there are none.
    """
    folders = [where] if Path(where).is_dir() else [path for path in sorted(glob.glob(where)) if Path(path).is_dir()]
    sides = [Side(results.runs, results.lines) for results in map(tables.load, folders) if len(results.runs)]
    if not sides:
        raise FileNotFoundError(f"{where}: there is no run, and no folder of runs, of that name")
    attempts = [attempt for side in sides for attempt in set(map(split, side.runs["run_id"]))]
    repeated = len(set(attempts)) < len(attempts)
    if repeated:  # different folders use the same names, and lines of code refer to their run by name
        sides = [
            Side(*(frame.assign(run_id=frame["run_id"] + f"/{number}") for frame in (latest(side.runs), side.lines)))
            for number, side in enumerate(sides)
        ]
    runs = in_order([side.runs for side in sides]).reset_index(drop=True)
    if repeated:
        names = runs["run_id"].str.rpartition("/")[0]
        runs = runs[~runs.assign(name=names).duplicated(["name", "started"])]
        runs = runs.assign(repeat=runs.groupby("cell_id", sort=False).cumcount())
    return Side(runs, pd.concat([side.lines for side in sides], ignore_index=True))


def measure_in_turns(
    rev_a: str, rev_b: str, launches: int, overrides: list[str], runs: Path | None
) -> tuple[Side, Side]:
    """Returns the runs of both revisions, their launches numbered. Raises ValueError if a command is refused, or
    without git.
    """
    if launches < LEAST:
        raise ValueError(f"--launches {launches}: must be at least {LEAST}, for fewer are not in turns")
    folder = (runs or Path(RUNS) / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")).resolve()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--runs {runs}: there is something in that folder already; name another")
    with ExitStack() as stack:
        checkouts = {side: stack.enter_context(_checkout(side, rev)) for side, rev in (("a", rev_a), ("b", rev_b))}
        turns = [(side, number) for number in range(launches) for side in ("ba" if number % 2 else "ab")]
        for count, (side, number) in enumerate(turns, 1):
            revision = rev_a if side == "a" else rev_b
            print_note(f"[{count}/{2 * launches}] {side.upper()}, {revision}, launch {number + 1}")
            _launch(checkouts[side], overrides, folder / f"{side}{number}", revision)
    print_note(f"runs: {folder}")
    a, b = (load_side(f"{glob.escape(str(folder))}/{side}*") for side in "ab")
    return a, b


def _launch(checkout: Path, overrides: list[str], folder: Path, revision: str) -> None:
    """Runs the command once with the package in `checkout`. Raises ValueError if it produced no runs."""
    more = ["measure.repeats=1", "rerun=true", f"results_dir={folder}"]
    path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "zerobench", *overrides, *more]  # -P: not the package in the current folder
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode not in (0, 1) or not folder.is_dir():
        said = next(iter(reversed(done.stderr.strip().splitlines())), f"exit code {done.returncode}")
        raise ValueError(f"{revision} cannot measure it: {said.removeprefix('zerobench: ')}")


@contextmanager
def _checkout(side: str, revision: str) -> Iterator[Path]:
    """Yields a worktree of a revision, removed at the end; for `.` the user's own checkout. Prints the commit. Raises
    ValueError.
    """
    top = PACKAGE.parent
    with suppress(GitError):  # the current folder may be in another repository, or in none
        here = Path(git(Path.cwd(), "rev-parse", "--show-toplevel"))
        top = here if (here / PACKAGE.name / "__main__.py").is_file() else top
    try:
        commit = full_hash(top, "HEAD" if revision == "." else revision)
        is_changed = revision == "." and git(top, "status", "--porcelain")
        changed = " with uncommitted changes" if is_changed else ""
    except GitError as error:
        raise ValueError(f"--interleave: {error}") from error
    print_note(f"{side.upper()}: {revision} is {commit}{changed}, of {top}")
    if revision == ".":
        yield top
        return
    with worktree(top, commit) as checkout:
        yield checkout
