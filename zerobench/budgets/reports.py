"""The findings of a budget check: for the terminal, for CI (JUnit XML, GitHub), for people (Markdown) and for charts
(JSON).

Each function takes all findings of a check, those of limits that hold included. A Markdown comment begins with a hidden
*marker*, by which a bot finds its own comment and replaces it. Every text from a run or a budget file is escaped: names
come from the pull request.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..host.pipes import write_text
from ..host.revisions import GitError, git
from ..host.terminal import print_on, stdout_console
from ..results.grid import Grid
from ..results.grid import markdown_text as escaped
from ..sizes import escape_control
from .budget_file import HEADER, LimitChange
from .judge import MORE_IS_BETTER, OK, Finding, shares_cause, show_difference, show_limit, show_tolerance, show_value
from .lines import CodeLine

STYLES = {"regression": "bold red", "missing": "bold red", "unjudged": "bold yellow", "improvement": "green"}
JUNIT_TAGS = {"regression": "failure", "missing": "failure", "unjudged": "error"}

KINDS = {"regression": "worse", "missing": "missing", "unjudged": "not measured", "improvement": "better"}
"""Kinds of findings -> their label, the most severe first."""


def broken(findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings whose limit does not hold."""
    return [finding for finding in findings if finding.kind != OK]


def limits_held(findings: Sequence[Finding]) -> str:
    """Returns the number of limits that hold."""
    limits = sum(finding.limits for finding in findings)
    return f"{len(findings) - len(broken(findings))} of {limits} limits hold" if limits else "no limit could be judged"


FIRST = ("growth_bytes", "peak_bytes", "volume_psi")
"""Metrics whose message names a cause best, for limits that are broken by one."""


def by_cause(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Groups broken limits by cell and cause; of each group the first is the headline."""
    ranks = {metric: number for number, metric in enumerate(FIRST)}
    groups: dict[str, list[list[Finding]]] = {}
    for finding in sorted(broken(findings), key=lambda finding: ranks.get(finding.metric, len(ranks))):
        of_cell = groups.setdefault(finding.cell, [])
        same = next((group for group in of_cell if shares_cause(finding, group[0])), None)
        if same is None:
            of_cell.append([finding])
        else:
            same.append(finding)
    return [group for of_cell in groups.values() for group in of_cell]


def print_findings(findings: Sequence[Finding]) -> None:
    """Prints a message per cause of broken limits, with the other limits that it breaks below; then the number of
    limits that hold.
    """
    console = stdout_console()
    for first, *others in by_cause(findings):
        console.print(first.kind, style=STYLES[first.kind], end=": ")
        print_on(console, first.sentence)
        if others:
            same = ", ".join(f"{finding.metric} {_row(finding)[-1]}" for finding in others)
            print_on(console, f"  the same cause: {same}", "dim")
    console.print(limits_held(findings), highlight=False)
    if any(finding.kind == "improvement" for finding in findings):
        console.print("Improvements are not in the budget yet: zerobench budget record --file FILE writes it again.")


def write_junit(path: Path, findings: Sequence[Finding]) -> None:
    """Writes a test case per limit; a finding without a metric is a case of its own."""
    suite = ElementTree.Element("testsuite", name="zerobench budget", tests=str(len(findings)))
    for finding in findings:
        name = finding.metric or "the cell"
        case = ElementTree.SubElement(suite, "testcase", classname=one_line(finding.cell), name=name)
        message = one_line(finding.sentence)
        if finding.kind in JUNIT_TAGS:
            ElementTree.SubElement(case, JUNIT_TAGS[finding.kind], message=message, type=finding.kind)
        elif finding.kind != OK:
            ElementTree.SubElement(case, "system-out").text = message
    for tag, attribute in (("failure", "failures"), ("error", "errors")):
        suite.set(attribute, str(len(suite.findall(f".//{tag}"))))
    write_text(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True).decode(), path)


def one_line(text: str) -> str:
    """Replaces line breaks and other control characters, which XML cannot contain, by spaces."""
    return "".join(c if c.isprintable() else " " for c in text)


def write_benchmark(path: Path, findings: Sequence[Finding]) -> None:
    """Writes the JSON that github-action-benchmark charts as customSmallerIsBetter: each measured metric where smaller
    is better and that is not 0 in both limit and value.
    """
    rows = []
    for finding in findings:
        metric, limit, value = finding.metric, finding.limit, finding.value
        if limit is None or value is None or metric in MORE_IS_BETTER or not (value or limit.value):
            continue
        row: dict[str, Any] = {
            "name": f"{finding.cell}: {metric}",
            "unit": {"bytes": "B", "psi": "ψ", "s": "s"}.get(metric.rpartition("_")[2], ""),
            "value": int(value) if value.is_integer() else value,
        }
        if limit.tolerance:
            row["range"] = show_tolerance(limit).strip()
        rows.append({**row, "extra": finding.sentence or f"limit: {show_limit(metric, limit)}"})
    write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", path)


# -- Markdown ------------------------------------------------------------------------------------------

MARKER = "<!-- zerobench budget check -->"
MARKER_OF_CHANGES = "<!-- zerobench budget record -->"

MOST_OF_COMMENT = 65_536
"""Most characters of a comment on GitHub."""

CUT = "\n\n(cut: the whole account is in the log of the check)\n"


def verdict(findings: Sequence[Finding]) -> str:
    """Returns a summary of the verdict: "3 worse, 1 better", or "every limit holds"."""
    kinds = [finding.kind for finding in findings]
    counts = [f"{kinds.count(kind)} {label}" for kind, label in KINDS.items() if kind in kinds]
    return ", ".join(counts) or ("every limit holds" if findings else "nothing was judged")


def check_body(findings: Sequence[Finding]) -> list[str]:
    """Returns the lines of a check's Markdown: the verdict, a table of the changes; collapsed lines of code and
    messages.
    """
    worst_first = sorted(broken(findings), key=lambda finding: list(KINDS).index(finding.kind))
    body = [f"### Memory and traffic: {verdict(findings)}", "", f"{limits_held(findings)}.", ""]
    if worst_first:
        body += [*_table(["", "cell", "metric", "limit", "now", "difference"], map(_row, worst_first)), ""]
    code_lines = [
        f"- {escaped(finding.cell)}, {escaped(finding.metric)}: {escaped(line.sentence)}"
        for finding in worst_first
        for line in finding.code_lines
    ]
    sentences = [f"- {escaped(finding.kind)}: {escaped(finding.sentence)}" for finding in worst_first]
    for title, lines in (("Lines of code that moved it", code_lines), ("In sentences", sentences)):
        body += [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""] if lines else []
    return body


def _row(finding: Finding) -> list[str]:
    metric, limit, value = finding.metric, finding.limit, finding.value
    if limit is None or value is None:
        return [KINDS[finding.kind], finding.cell, metric or "–", "–", "–", "–"]
    held = f"{limit.bound} {show_value(metric, limit.value)}{show_tolerance(limit)}".strip()
    by = show_difference(metric, value - limit.value)
    return [KINDS[finding.kind], finding.cell, metric, held, show_value(metric, value), by]


def changes_body(file: str, changes: list[LimitChange]) -> list[str]:
    """Returns the lines of a recording's Markdown: each changed limit, its cause, and the line."""
    counts = {0: "no limit changes", 1: "1 limit changes"}
    head = f"### Budget {escaped(file)}: {counts.get(len(changes), f'{len(changes)} limits change')}"
    return [head, "", *(_table(HEADER, [change.row for change in changes]) if changes else ())]


def _table(header: Sequence[str], rows: Any) -> list[str]:
    return Grid(header, list(rows)).markdown(sides=False).splitlines()


def fitted(body: list[str], most: int) -> str:
    """Joins as many lines of a body as fit; an open fold is closed."""
    text = "\n".join(body) + "\n"
    if len(text.encode()) <= most:
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


def write_comment(path: Path, marker: str, body: list[str]) -> None:
    """Writes as many lines of a body as a comment may have, below a marker."""
    write_text(fitted([marker, *body], MOST_OF_COMMENT), path)


# -- in a GitHub workflow --------------------------------------------------------------------------------
# An annotation is a line of the log, `::error file=model.py,line=31,title=...::sentence`. Texts from runs and budget
# files are escaped, so that a cell's name is not a command; a file is named only if it is inside the repository.

LEVELS = {"regression": "error", "missing": "error", "unjudged": "warning", "improvement": "notice"}

MOST_ANNOTATIONS = 10
"""Annotations per level that GitHub shows for one step; the last one summarizes the rest."""

MOST_OF_SUMMARY = 1_000_000
"""Most bytes of a step's summary, with some margin."""


def is_github(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns True in a step of a GitHub workflow."""
    return environment.get("GITHUB_ACTIONS") == "true"


def report_to_github(findings: Sequence[Finding]) -> None:
    """Prints the annotations, and adds the verdict to the step's summary."""
    for command in commands_of(broken(findings), repository_root()):
        print(command)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(fitted(check_body(findings), MOST_OF_SUMMARY))


def commands_of(findings: list[Finding], root: Path | None) -> list[str]:
    """Returns a workflow command per level, cell and line. `root`: of the repository; None if there is none."""
    groups: dict[tuple[str, str, tuple[str, int]], list[Finding]] = {}
    for finding in findings:
        tracked = ((root and _inside(line, root), line.line) for line in finding.code_lines)
        first = next(((file, number) for file, number in tracked if file), ("", 0))
        groups.setdefault((LEVELS[finding.kind], finding.cell, first), []).append(finding)
    commands = []
    for level in dict.fromkeys(LEVELS.values()):
        of_level = [(code_line, same) for (its, _, code_line), same in groups.items() if its == level]
        of_level.sort(key=lambda group: not group[0][0])  # those with a line are worth most
        shown = of_level if len(of_level) <= MOST_ANNOTATIONS else of_level[: MOST_ANNOTATIONS - 1]
        commands += [_command(level, code_line, same) for code_line, same in shown]
        if others := [finding for _, same in of_level[len(shown) :] for finding in same]:
            commands.append(_command(level, ("", 0), others, f"{len(others)} more findings"))
    return commands


def _inside(line: CodeLine, root: Path) -> str:
    """Returns the file's path relative to the repository's root; empty if it is not a file inside it.

    A loop that ran in another folder of the repository names its files relative to that folder: they are matched with
    the only tracked file of that name.
    """
    if not line.file or line.line < 1:
        return ""
    try:
        file = Path(line.file).resolve(strict=True)
        return file.relative_to(root.resolve()).as_posix() if file.is_file() else ""
    except (OSError, ValueError, RuntimeError):  # no such file, not below the root, no path at all
        named = [file for file in _tracked(root) if file.endswith(f"/{line.file}")]
        return named[0] if len(named) == 1 else ""


@cache
def _tracked(root: Path) -> list[str]:
    """Returns the files that git tracks; empty if git fails."""
    try:
        return git(root, "ls-files", "-z").split("\0")
    except GitError:
        return []


def _command(level: str, code_line: tuple[str, int], findings: list[Finding], title: str = "") -> str:
    first = findings[0]
    more = f" and {len(findings) - 1} more" if len(findings) > 1 else ""
    title = title or (f"{first.metric} of {first.cell}{more}" if first.metric else f"{first.kind}: {first.cell}")
    properties = {"file": code_line[0], "line": str(code_line[1])} if code_line[0] else {}
    properties["title"] = title
    shown = ",".join(f"{k}={_data(v).replace(':', '%3A').replace(',', '%2C')}" for k, v in properties.items())
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
