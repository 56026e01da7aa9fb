"""A budget check in a GitHub workflow: annotations on lines of code, and the summary of the step.

An annotation is a line of the log, `::error file=model.py,line=31,title=...::sentence`. Texts from runs and budget
files are escaped, so that a cell's name is not a command; a file is named only if it is inside the repository.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from ..host.revisions import GitError, git
from ..sizes import escape_control
from .judge import Finding
from .lines import Place
from .reports import broken, check_body, fitted

LEVELS = {"regression": "error", "missing": "error", "unjudged": "warning", "improvement": "notice"}

MOST = 10
"""Annotations per level that GitHub shows for one step; the last one summarizes the rest."""

MOST_OF_SUMMARY = 1_000_000
"""Most bytes of a step's summary, with some margin."""


def is_github(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns True in a step of a GitHub workflow."""
    return environment.get("GITHUB_ACTIONS") == "true"


def tell_github(findings: Sequence[Finding], environment: Mapping[str, str] = os.environ) -> None:
    """Prints the annotations, and adds the verdict to the step's summary."""
    for command in commands_of(broken(findings), repository_root(environment)):
        print(command)
    if summary := environment.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(fitted(check_body(findings), MOST_OF_SUMMARY))


def commands_of(findings: list[Finding], root: Path | None) -> list[str]:
    """Returns a workflow command per level, cell and line. `root`: of the repository; None if there is none."""
    groups: dict[tuple[str, str, tuple[str, int]], list[Finding]] = {}
    for finding in findings:
        places = ((root and _inside(place, root), place.line) for place in finding.places)
        first = next(((file, line) for file, line in places if file), ("", 0))
        groups.setdefault((LEVELS[finding.kind], finding.cell, first), []).append(finding)
    commands = []
    for level in dict.fromkeys(LEVELS.values()):
        of_level = [(place, same) for (its, _, place), same in groups.items() if its == level]
        of_level.sort(key=lambda group: not group[0][0])  # those with a line are worth most
        fits = len(of_level) <= MOST
        commands += [_command(level, place, same) for place, same in (of_level if fits else of_level[: MOST - 1])]
        if not fits:
            others = [finding for _, same in of_level[MOST - 1 :] for finding in same]
            commands.append(_command(level, ("", 0), others, f"{len(others)} more findings"))
    return commands


def _inside(place: Place, root: Path) -> str:
    """Returns the file's path relative to the repository's root; empty if it is not a file inside it.

    A loop that ran in another folder of the repository names its files relative to that folder: they are matched with
    the only tracked file of that name.
    """
    if not place.file or place.line < 1:
        return ""
    try:
        file = Path(place.file).resolve(strict=True)
        return file.relative_to(root.resolve()).as_posix() if file.is_file() else ""
    except (OSError, ValueError, RuntimeError):  # no such file, not below the root, no path at all
        named = [file for file in _tracked(root) if file.endswith(f"/{place.file}")]
        return named[0] if len(named) == 1 else ""


@cache
def _tracked(root: Path) -> list[str]:
    """Returns the files that git tracks; empty if git fails."""
    try:
        return git(root, "ls-files", "-z").split("\0")
    except GitError:
        return []


def _command(level: str, place: tuple[str, int], findings: list[Finding], title: str = "") -> str:
    first = findings[0]
    more = f" and {len(findings) - 1} more" if len(findings) > 1 else ""
    title = title or (f"{first.metric} of {first.cell}{more}" if first.metric else f"{first.kind}: {first.cell}")
    properties = {"file": place[0], "line": str(place[1])} if place[0] else {}
    shown = ",".join(
        f"{key}={_data(value).replace(':', '%3A').replace(',', '%2C')}"
        for key, value in {**properties, "title": title}.items()
    )
    return f"::{level} {shown}::{_data(chr(10).join(finding.sentence for finding in findings))}"


def _data(text: str) -> str:
    return escape_control(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def repository_root(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the folder of the checkout: the workflow's, or the closest parent folder with a .git."""
    workspace = environment.get("GITHUB_WORKSPACE")
    if workspace and Path(workspace).is_dir():
        return Path(workspace)
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), None)
