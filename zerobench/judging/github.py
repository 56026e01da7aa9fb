"""A budget check on GitHub: annotations on lines of code, the summary of a step, the comment on a pull request.

An annotation is a line of the log, `::error file=model.py,line=31,title=...::sentence`. Texts from runs and budget
files are escaped, so that a cell's name is not a command; a file is named only if it is inside the repository.

A comment begins with a hidden *marker*, by which a bot finds its own comment and replaces it. Every text from a run or
a budget file is escaped: names come from the pull request.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from ..host.revisions import GitError, git
from ..results.grid import Grid
from ..results.grid import markdown_text as escaped
from ..sizes import escape_control
from .judge import Finding, Limit, show_value
from .lines import Place
from .recording import HEADER, LimitChange
from .reports import Verdicts, write

LEVELS = {"regression": "error", "missing": "error", "unjudged": "warning", "improvement": "notice"}

MOST = 10
"""Annotations per level that GitHub shows for one step; the last one summarizes the rest."""


def is_github(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns True in a step of a GitHub workflow."""
    return environment.get("GITHUB_ACTIONS") == "true"


def commands_of(findings: list[Finding], root: Path | None) -> list[str]:
    """Returns a workflow command per level, cell and line. `root`: of the repository; None if there is none."""
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
    """Returns the file's path relative to the repository's root; empty if it is not a file inside it.

    A loop that ran in another folder of the repository names its files relative to that folder: they are matched with
    the only tracked file of that name.
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
    """Returns the files that git tracks; empty if git fails."""
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
    return escape_control(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def repository_root(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the folder of the checkout: the workflow's, or the closest parent folder with a .git."""
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


MARKER = "<!-- zerobench budget check -->"
MARKER_OF_CHANGES = "<!-- zerobench budget record -->"
MOST_OF_COMMENT = 65_536
"""Most characters of a comment on GitHub."""
MOST_OF_SUMMARY = 1_000_000
"""Most bytes of a step's summary, with some margin."""

CUT = "\n\n(cut: the whole account is in the log of the check)\n"

KINDS = {"regression": "worse", "missing": "missing", "unjudged": "not measured", "improvement": "better"}
"""Kinds of findings -> their label, the most severe first."""


def table(header: Sequence[str], rows: list[list[str]]) -> list[str]:
    """Returns the lines of a Markdown table, of which a comment may have too little room for some."""
    return Grid(header, rows).markdown(sides=False).splitlines()


def folded(title: str, lines: list[str]) -> list[str]:
    """Returns lines that are collapsed under their title."""
    return [f"<details><summary>{escaped(title)}</summary>", "", *lines, "", "</details>", ""] if lines else []


def fitted(body: list[str], most: int) -> str:
    """Joins as many lines of a body as fit; an open fold is closed."""
    text = "\n".join(body) + "\n"
    if len(text) <= most and len(text.encode()) <= most:
        return text
    kept: list[str] = []
    left = most - len(CUT) - len("\n</details>")
    for line in body:
        left -= len(line.encode()) + 1
        if left < 0:
            break
        kept.append(line)
    is_open = sum("<details>" in line for line in kept) > sum("</details>" in line for line in kept)
    return "\n".join(kept) + "\n" + "\n</details>" * is_open + CUT


def verdict(verdicts: Verdicts) -> str:
    """Returns a summary of the verdict: "3 worse, 1 better", or "every limit holds"."""
    kinds = [one.kind for one in verdicts.findings]
    words = [f"{kinds.count(kind)} {word}" for kind, word in KINDS.items() if kind in kinds]
    return ", ".join(words) or ("every limit holds" if verdicts.judged else "nothing was judged")


def check_body(verdicts: Verdicts) -> list[str]:
    """Returns the Markdown of a check: the verdict, a table of the changes; collapsed lines of code and messages."""
    found = sorted(verdicts.findings, key=lambda one: list(KINDS).index(one.kind))
    body = [MARKER, f"### Memory and traffic: {verdict(verdicts)}", ""]
    body += [f"{verdicts.words}.", ""]
    rows = []
    for one in found:
        limit, value = verdicts.measured.get((one.cell, one.metric), (None, 0.0))
        kind = KINDS[one.kind]
        if limit is None:
            rows.append([kind, one.cell, one.metric or "–", "–", "–", "–"])
            continue
        by = value - limit.value
        signed = f"{'+' if by > 0 else '−'}{show_value(one.metric, abs(by))}"
        rows.append([kind, one.cell, one.metric, _limit(one.metric, limit), show_value(one.metric, value), signed])
    if rows:
        body += [*table(["", "cell", "metric", "limit", "now", "difference"], rows), ""]
    places = [
        f"- {escaped(one.cell)}, {escaped(one.metric)}: {escaped(p.sentence)}" for one in found for p in one.places
    ]
    body += folded("Lines of code that moved it", places)
    return [*body, *folded("In sentences", [f"- {escaped(one.kind)}: {escaped(one.sentence)}" for one in found])]


def _limit(metric: str, limit: Limit) -> str:
    tolerance = f" ± {limit.tolerance * 100:g} %" if limit.tolerance else ""
    return f"{limit.bound} {show_value(metric, limit.value)}{tolerance}".strip()


def changes_body(file: str, changes: list[LimitChange]) -> list[str]:
    """Returns the Markdown of a recording: each changed limit, its cause, and the line."""
    if not changes:
        return [MARKER_OF_CHANGES, f"### Budget {escaped(file)}: no limit changes", ""]
    count = "1 limit changes" if len(changes) == 1 else f"{len(changes)} limits change"
    return [MARKER_OF_CHANGES, f"### Budget {escaped(file)}: {count}", "", *table(HEADER, [one.row for one in changes])]


def write_comment(path: Path, body: list[str]) -> None:
    """Writes as many lines of a body as a comment may have."""
    write(path, fitted(body, MOST_OF_COMMENT))
