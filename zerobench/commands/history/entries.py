"""Entries of a history: what was measured, by commit, in the order of the commits.

A history folder has a folder per entry: a collection or a results folder, with `commit.json` where `zerobench history
add` wrote it. Without that file the commit is that of the runs. In the commits' repository the order is git's; of
commits that it does not know, and outside of one, the dates decide.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from ...host.temporary import temporary_folder
from ...results.options import Where
from ...results.selection import matching, standing_or_failed
from ...results.tables import Results, collections_in, load, merge, run_folders
from ..bisect.measure import cells_of
from ..revisions import Commit, GitError, commits, git, git_bytes

ABOUT = "commit.json"
"""The file of an entry that says of which commit it is."""


@dataclass(frozen=True)
class Entry:
    """A measured commit. `gap`: commits before it, after the entry before, that were not measured; None: unknown.

    `cells`: name -> row of runs. `lines`: the rows of code of all cells.
    """

    commit: Commit
    cells: dict[str, dict[str, Any]]
    lines: pd.DataFrame
    gap: int | None = None


@dataclass(frozen=True)
class History:
    """Entries in order. `note`: on what the order is, where it is not git's; empty where it is."""

    entries: list[Entry]
    note: str = ""


@contextmanager
def folder_of(repository: Path, branch: str, path: str) -> Iterator[Path]:
    """Yields a temporary folder with what a branch holds below `path`; nothing is checked out. Raises GitError."""
    packed = git_bytes(repository, "archive", "--format=tar", branch, *([path] if path else []))
    with temporary_folder() as aside:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(aside / "branch", filter="data")
        yield aside / "branch" / path


def read(where: Path, repository: Path | None, conditions: Sequence[Where], last: int | None) -> History:
    """Reads a history folder. Raises FileNotFoundError or ValueError, a sentence, where there is nothing to read."""
    if not where.is_dir():
        raise FileNotFoundError(f"{where}: there is no such folder; zerobench history add makes one")
    parts = [part for place in _places(where) for part in _by_commit(place)]
    if not parts:
        raise ValueError(f"{where}: holds no runs; zerobench history add {where} --runs RESULTS adds a commit's")
    merged: dict[str, tuple[Commit, list[Results]]] = {}
    for commit, results in parts:
        merged.setdefault(commit.hash, (commit, []))[1].append(results)
    found = [(commit, merge(results)) for commit, results in merged.values()]
    found, gaps, note = _ordered(found, repository)
    if last is not None:
        found, gaps = found[-last:], [None, *gaps[-last:][1:]]
    _require(found, conditions)
    entries = [_entry(commit, results, conditions, gap) for (commit, results), gap in zip(found, gaps, strict=True)]
    return History([one for one in entries if one.cells], note)


def _places(where: Path) -> list[Path]:
    """Returns the folders of entries: `where` itself where it holds runs, and those directly in it that do."""
    inside = [one for one in sorted(where.iterdir()) if one.is_dir() and not one.name.startswith(".")]
    holding = [one for one in inside if not (one / "run.json").is_file() and (collections_in(one) or run_folders(one))]
    itself = (where / "runs.parquet").is_file() or bool(run_folders(where))
    return [where] * itself + holding


def _by_commit(place: Path) -> list[tuple[Commit, Results]]:
    """Reads an entry's folder: of the commit that its file names, or by the commits of its runs."""
    results = load(place)
    if results.runs.empty:
        return []
    if (place / ABOUT).is_file():
        return [(_told(place / ABOUT), results)]
    found = []
    for name, runs in results.runs.groupby(results.runs["commit"].fillna(place.name), sort=False):
        found.append((Commit(str(name), "", "", str(runs["started"].min())), results.of(runs["run_id"])))
    return found


def _told(path: Path) -> Commit:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        return Commit(*(str(about[name]) for name in ("hash", "tree", "subject", "date")))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path}: does not say of which commit it is: {str(error) or type(error).__name__:.80}"
        ) from error


def write_about(folder: Path, commit: Commit) -> None:
    """Writes of which commit an entry is."""
    (folder / ABOUT).write_text(json.dumps(asdict(commit), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


Found = list[tuple[Commit, Results]]


def _ordered(found: Found, repository: Path | None) -> tuple[Found, list[int | None], str]:
    """Returns the entries in order, the gap before each, and a note where the order is not git's."""
    known = {name: one for name in (c.hash for c, _ in found) if (one := _known(repository, name)) is not None}
    found = [(known.get(commit.hash, commit), results) for commit, results in found]
    if repository is None or len(known) < len(found):
        found.sort(key=lambda one: one[0].date)
        missing = len(found) - len(known)
        note = "outside of the commits' repository: in the order of their dates"
        if repository is not None:
            note = f"{missing} of {len(found)} commits are not in this repository: in the order of their dates"
        return found, [None] * len(found), note
    order = git(repository, "rev-list", "--topo-order", "--reverse", "--stdin", given="\n".join(known)).split()
    place = {name: number for number, name in enumerate(order)}
    found.sort(key=lambda one: place[one[0].hash])
    places = [place[commit.hash] for commit, _ in found]
    return found, [None, *(b - a - 1 for a, b in pairwise(places))], ""


def _known(repository: Path | None, name: str) -> Commit | None:
    if repository is None:
        return None
    try:
        git(repository, "cat-file", "-e", f"{name}^{{commit}}")
        return commits(repository, [name])[0]
    except GitError:
        return None


def _require(found: Found, conditions: Sequence[Where]) -> None:
    """Raises ValueError for conditions that no run of the history meets."""
    if conditions:
        matching(merge([results for _, results in found]).runs, conditions)


def _entry(commit: Commit, results: Results, conditions: Sequence[Where], gap: int | None) -> Entry:
    runs = standing_or_failed(results.runs)
    try:
        kept = matching(runs, conditions)
    except ValueError:  # another commit has such runs
        kept = runs[:0]
    entry = Entry(commit, cells_of(kept), results.lines, gap)
    return replace(entry, cells={_with_device(name, row): row for name, row in entry.cells.items()})


def _with_device(name: str, row: dict[str, Any]) -> str:
    """Returns a cell's name with the GPU that it ran on: figures of two devices are no series."""
    return name if row["device_class"] == "cpu" else f"{name}, {row['device_class']}"
