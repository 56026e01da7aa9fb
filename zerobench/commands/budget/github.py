"""A budget check inside of a GitHub workflow: annotations on lines of code, and the step's summary.

An annotation is a line of the log, `::error file=model.py,line=31,title=...::sentence`. Texts of runs and budget files
are escaped, so that a cell's name is no command; a file is named only where it lies inside of the repository.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ..revisions import GitError, git
from .comment import MOST_OF_SUMMARY, check_body, fitted
from .judge import Finding
from .lines import Place
from .report import Verdicts

LEVELS = {"regression": "error", "missing": "error", "unjudged": "warning", "improvement": "notice"}

MOST = 10
"""Annotations of a level that GitHub shows of one step; the last one tells of the others."""


def is_github(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns True in a step of a GitHub workflow."""
    return environment.get("GITHUB_ACTIONS") == "true"


def commands_of(findings: list[Finding], root: Path | None) -> list[str]:
    """Returns a workflow command per level, cell and line, the findings of one line together; `root`: the repository's,
    None where there is none.
    """
    groups: dict[tuple[str, str, tuple[str, int]], list[Finding]] = {}
    for one in findings:
        groups.setdefault((LEVELS[one.kind], one.cell, _first_place(one, root)), []).append(one)
    commands = []
    for level in dict.fromkeys(LEVELS.values()):
        mine = [(place, found) for (its, _, place), found in groups.items() if its == level]
        mine.sort(key=lambda one: not one[0][0])  # those with a line are worth most
        shown, left = (mine, []) if len(mine) <= MOST else (mine[: MOST - 1], mine[MOST - 1 :])
        commands += [_command(level, place, found) for place, found in shown]
        if left:
            others = [one for _, found in left for one in found]
            commands.append(_command(level, ("", 0), others, f"{len(others)} more findings"))
    return commands


def _first_place(finding: Finding, root: Path | None) -> tuple[str, int]:
    for place in finding.places:
        file = _inside(place, root)
        if file:
            return file, place.line
    return "", 0


def _inside(place: Place, root: Path | None) -> str:
    """Returns the file's path from the repository's root; nothing where it is not a file in it.

    A loop that ran in another folder of the repository names its files from there: the one file of git's of that name.
    """
    if root is None or not place.file or place.line < 1:
        return ""
    try:
        found = Path(place.file).resolve(strict=True)
        return found.relative_to(root.resolve()).as_posix() if found.is_file() else ""
    except (OSError, ValueError, RuntimeError):  # no such file, not below the root, no path at all
        named = [one for one in _tracked(root) if one.endswith(f"/{place.file}")]
        return named[0] if len(named) == 1 else ""


@cache
def _tracked(root: Path) -> list[str]:
    """Returns the files that git tracks; none where it tells none."""
    try:
        return git(root, "ls-files", "-z").split("\0")
    except GitError:
        return []


def _command(level: str, place: tuple[str, int], found: list[Finding], title: str = "") -> str:
    first = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    title = title or (f"{first.metric} of {first.cell}{more}" if first.metric else f"{first.kind}: {first.cell}")
    properties = {"file": place[0], "line": str(place[1])} if place[0] else {}
    shown = ",".join(f"{key}={_property(value)}" for key, value in {**properties, "title": title}.items())
    return f"::{level} {shown}::{_data(chr(10).join(one.sentence for one in found))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def repository_root(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the folder of the checkout: that of the workflow, or the nearest above that has a .git."""
    workspace = environment.get("GITHUB_WORKSPACE")
    if workspace and Path(workspace).is_dir():
        return Path(workspace)
    here = Path.cwd()
    return next((one for one in (here, *here.parents) if (one / ".git").exists()), None)


def tell_github(verdicts: Verdicts, environment: Mapping[str, str] = os.environ) -> None:
    """Prints the annotations, and adds the verdict to the step's summary."""
    for command in commands_of(verdicts.findings, repository_root(environment)):
        print(command)
    if summary := environment.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(fitted(check_body(verdicts)[1:], MOST_OF_SUMMARY))
