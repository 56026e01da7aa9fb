"""`zerobench history add`: the runs of a commit become an entry of a history, in a folder or on a branch.

An entry keeps the tables of runs, memory, lines and traffic; the others are long and are left out. Where the commit has
an entry, runs of the same cells take the place of its own, so that several jobs may add to it.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from ...results.selection import standing_or_failed
from ...results.tables import Results, collect, load, merge
from ..revisions import Commit, GitError, environment, git, git_bytes
from .entries import folder_of, write_about

KEPT = ("runs", "memory", "lines", "traffic")

NOTHING = "0" * 40
"""The hash that git takes for a branch that is not there."""


def gathered(where: Path) -> Results:
    """Returns the standing and failed runs of a results folder, with the tables that are kept. Raises ValueError."""
    if not where.is_dir():
        raise ValueError(f"--runs {where}: there is no such results folder")
    results = load(where)
    if results.runs.empty:
        raise ValueError(f"--runs {where}: holds no runs")
    return _kept(results.of(standing_or_failed(results.runs)["run_id"]))


def add(folder: Path, commit: Commit, new: Results) -> Path:
    """Adds runs to a history folder as an entry of the commit; returns the entry's folder."""
    entry = folder / commit.hash[:12]
    if (entry / "runs.parquet").is_file():
        old = load(entry)
        cells = set(zip(new.runs["cell_id"], new.runs["device_class"], strict=True))
        kept = [
            str(row.run_id) for row in old.runs.itertuples()
            if (row.cell_id, row.device_class) not in cells and row.run_id not in set(new.runs["run_id"])
        ]  # fmt: skip
        new = merge([old.of(kept), new]) if kept else new
    aside = folder / f".{entry.name}"
    shutil.rmtree(aside, ignore_errors=True)
    collect(new, aside)
    write_about(aside, commit)
    if entry.is_dir():
        shutil.rmtree(entry)
    aside.rename(entry)
    return entry


def add_to_branch(repository: Path, branch: str, path: str, commit: Commit, new: Results, aside: Path) -> str:
    """Adds runs to a history on a branch, which is made where it is not there; returns the branch's new commit.

    The tree is written with an index of its own below `aside`: neither a checkout nor the user's index is touched.
    """
    reference = f"refs/heads/{branch}"
    try:
        tip = git(repository, "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}")
    except GitError:
        tip = ""
    work = aside / "work"
    history = work / path
    entry = f"{path}/{commit.hash[:12]}".lstrip("/")
    if tip and git(repository, "ls-tree", "--name-only", tip, entry):
        with folder_of(repository, tip, entry) as there:
            shutil.copytree(there, work / entry)
    history.mkdir(parents=True, exist_ok=True)
    add(history, commit, new)
    own = environment() | {"GIT_INDEX_FILE": str(aside / "index")}
    if tip:
        git_bytes(repository, "read-tree", tip, variables=own)
    git_bytes(repository, f"--work-tree={work}", "add", "--force", "--", str(work / entry), variables=own)
    tree = git_bytes(repository, "write-tree", variables=own).decode().strip()
    words = f"Figures of {commit.short}: {commit.subject}"
    parents = ["-p", tip] if tip else []
    made = git_bytes(repository, "commit-tree", tree, *parents, "-m", words, variables=own).decode().strip()
    git(repository, "update-ref", reference, made, tip or NOTHING)  # refused where another job has moved the branch
    return made


def _kept(results: Results) -> Results:
    emptied = {name: getattr(results, name)[:0] for name in vars(results) if name not in KEPT}
    return replace(results, **emptied)
