"""Merges one results folder into another: what is missing there is copied, run by run, each whole or not at all.

    1. plan      every run, collection and search of the source, against the contents of the target
    2. copy      into a claimed folder of the target (results/folders.py), on the disk before it has its name
    3. rename    to its own name, or where another run has that to the next attempt; its row says so too

What was copied before an interruption is there, and equal, the next time. A run that was renamed has its new name in
its row, in the tables of its collection and in the searches that name it.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from ...host.durable import is_there, replace_text, sync, sync_files
from ...host.files import read_text
from ...host.temporary import Aside
from ...results.folders import claim_folder, finite, rename_free
from ...results.selection import split
from ...results.tables import SEARCHES, TABLES, Results, collect, collections_in, is_whole, load, read_row, run_folders
from .contents import ROW, Contents, contents, files_of, rows_of, search_of

COPY, THERE, LEFT_OUT = "copy", "there", "left out"


@dataclass(frozen=True)
class Item:
    """A thing to merge. `kind`: run, collection or search. `name`: in the source; `to`: in the target. `what`: COPY,
    THERE or LEFT_OUT; `why`: a sentence on what is left out.
    """

    kind: str
    path: Path
    name: str
    what: str
    to: str = ""
    why: str = ""
    tables: Results | None = None

    def without(self, why: str) -> Item:
        """Returns the item as one that was left out."""
        return replace(self, what=LEFT_OUT, to="", why=why)

    @property
    def renamed(self) -> bool:
        """True where it is copied under another name."""
        return self.what == COPY and self.to != self.name


@dataclass
class Merge:
    """The merge of `source` into `target`. `names`: a run's name in the source -> its name in the target."""

    source: Path
    target: Path
    there: Contents = field(init=False)
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.there = contents(self.target)

    def plan(self) -> Iterator[Item]:
        """Yields the items in the order in which they are to be copied; searches last, since they name runs."""
        folders = sorted(run_folders(self.source), key=lambda folder: split(folder.name))
        for folder in folders:
            yield self._plan_run(folder)
        for collection in collections_in(self.source):
            yield from self._plan_collection(collection)
        for path in sorted((self.source / SEARCHES).glob("*.json")):
            yield self._plan_search(path)

    def _plan_run(self, folder: Path) -> Item:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            row = read_row(folder)
            if row is None or not is_whole(folder):
                return Item("run", folder, folder.name, LEFT_OUT, why="; ".join(str(one.message) for one in caught))
        if (known := self.there.like(row, folder)) is not None:
            self.names[row["run_id"]] = known
            return Item("run", folder, row["run_id"], THERE, known)
        to = self.there.free(row["run_id"])
        self.names[row["run_id"]] = to
        self.there.add(row, to)
        return Item("run", folder, row["run_id"], COPY, to)

    def _plan_collection(self, folder: Path) -> Iterator[Item]:
        """Plans the runs and searches of a collection that the target has not."""
        item = Item("collection", folder, folder.name, THERE, folder.name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = load(folder)
        if caught:
            yield item.without("; ".join(str(one.message) for one in caught))
        new: dict[str, str] = {}
        for row in rows_of(results.runs):
            known = self.there.like(row, None)
            if known is None:
                known = new[row["run_id"]] = self.there.free(row["run_id"])
                self.there.add(row, known, collected=True)
            self.names[row["run_id"]] = known
        searches = [row for row in map(self._named, rows_of(results.searches)) if self._is_new(row)]
        if new or searches:
            to = next(name for name in numbered(folder.name) if name not in self.there.names)
            self.there.names.add(to)
            yield replace(item, what=COPY, to=to, tables=renamed(results.of(new), new, searches))
        elif not caught:
            yield item

    def _plan_search(self, path: Path) -> Item:
        try:
            row = self._named(dict(json.loads(read_text(path))))
            said = search_of(row)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return Item("search", path, path.stem, LEFT_OUT, why=f"{path} cannot be read: {error}")
        if said in self.there.searches:
            return Item("search", path, path.stem, THERE, self.there.searches[said])
        taken = set(self.there.searches.values())
        to = next(name for name in numbered(path.stem) if name not in taken)
        self.there.searches[said] = to
        return Item("search", path, path.stem, COPY, to)

    def _named(self, search: dict[str, Any]) -> dict[str, Any]:
        """Returns a search with its runs' names in the target."""
        return search | {"run_ids": " ".join(self.names.get(name, name) for name in search["run_ids"].split())}

    def _is_new(self, search: dict[str, Any]) -> bool:
        said = search_of(search)
        known = said in self.there.searches
        self.there.searches.setdefault(said, search["search_id"])
        return not known

    def copy(self, item: Item) -> Item:
        """Copies an item; returns it with the name that it got, which another process may have taken meanwhile."""
        how = {"run": self._copy_run, "collection": self._copy_collection, "search": self._copy_search}
        copied = how[item.kind](item)
        if item.kind == "run":
            self.names[item.name] = copied
        return replace(item, to=copied)

    def _copy_run(self, item: Item) -> str:
        row = json.loads(read_text(item.path / ROW))
        prefix, attempt = split(item.to)
        with claimed(self.target, prefix) as aside:
            for path in files_of(item.path):
                (aside.path / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(item.path / path, aside.path / path)
            return rename_free(aside.path, prefix, row, attempt).name

    def _copy_collection(self, item: Item) -> str:
        assert item.tables is not None
        if taken := [name for name in item.tables.runs["run_id"] if (self.target / name).exists()]:
            raise ValueError(f"{taken[0]} was written there meanwhile; the same command finds another name")
        with claimed(self.target, item.name) as aside:
            collect(item.tables, aside.path)
            sync_files(aside.path)
            for name in numbered(item.name):
                to = self.target / name
                if to.exists():
                    continue
                try:
                    aside.path.rename(to)
                except OSError as error:
                    if not is_there(to, error):
                        raise
                    if aside.path.exists():
                        continue
                sync(self.target)
                return name
        raise AssertionError("names do not end")

    def _copy_search(self, item: Item) -> str:
        row = self._named(json.loads(read_text(item.path))) | {"search_id": item.to}
        folder = self.target / SEARCHES
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / f"{item.to}.json", json.dumps(finite(row), indent=1, allow_nan=False))
        return item.to


@contextmanager
def claimed(where: Path, prefix: str) -> Iterator[Aside]:
    """Claims a folder; whatever goes wrong, nothing of it is left."""
    aside = claim_folder(where, prefix)
    try:
        yield aside
    except BaseException:
        shutil.rmtree(aside.path, ignore_errors=True)
        raise
    finally:
        aside.release()


def numbered(name: str) -> Iterator[str]:
    """Yields a name, then the name with 2, 3, ..."""
    yield name
    number = 2
    while True:
        yield f"{name}-{number}"
        number += 1


def renamed(results: Results, names: dict[str, str], searches: list[dict[str, Any]]) -> Results:
    """Returns tables with other names of runs in all of them, and with these searches."""
    tables = {name: getattr(results, name).copy() for name in ("runs", *TABLES)}
    for table in tables.values():
        table["run_id"] = [names.get(run, run) for run in table["run_id"]]
    columns = results.searches.columns
    return Results(**tables, searches=pd.DataFrame(searches, columns=columns) if searches else results.searches[:0])
