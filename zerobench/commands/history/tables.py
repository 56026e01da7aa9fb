"""Tables of a history: for the terminal, as Markdown, and for other programs as CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from ...results.grid import Grid
from ...sizes import printable, show_bytes, show_count
from ..bisect.report import show_value
from .entries import History
from .series import Point, Series

HEADER = ["commit", "date", "subject", "value", "step"]
LONGEST_SUBJECT = 60

INEXACT = "it does not repeat exactly, so no steps are marked"


def title(one: Series) -> str:
    """Names a series."""
    return f"{one.metric}, {one.cell}"


def unmoved(one: Series) -> str:
    """Says the value of a series that has only one, and failed nowhere; empty for any other."""
    if one.steps or not one.exact or any(point.value is None for point in one.points):
        return ""
    count = len(one.points)
    return f"{show_value(one.points[0].value)} at {'all ' * (count > 1)}{show_count(count, 'commit')}"


def rows(one: Series, steps_only: bool = False, lines: int = 1) -> list[list[str]]:
    """Returns the table of a series, the gaps between its entries among the rows.

    `steps_only`: without entries at which nothing moved, but for the first and the last. `lines`: of code, per step.
    """
    found = []
    for number, point in enumerate(one.points):
        if number and point.gap:
            found.append(["…", "", f"{show_count(point.gap, 'commit')} not measured", "", ""])
        if not steps_only or point.is_step or point.value is None or number in (0, len(one.points) - 1):
            found.append(_row(point, one.metric, lines))
    return found


def _row(point: Point, metric: str, lines: int) -> list[str]:
    commit = point.entry.commit
    subject = commit.subject if len(commit.subject) <= LONGEST_SUBJECT else f"{commit.subject[: LONGEST_SUBJECT - 1]}…"
    value = f"{point.status}: {point.reason}" if point.value is None else show_value(point.value)
    return [commit.short, commit.date[:10], subject, value, step_in_words(point, metric, lines)]


def step_in_words(point: Point, metric: str, lines: int = 1) -> str:
    """Formats a step: its difference, the versions of torch where they differ, and lines of code; else nothing."""
    if point.difference is None:
        return ""
    by, size = point.difference, show_bytes if metric.endswith("_bytes") else show_value
    words = f"{'+' if by > 0 else '−'}{size(abs(by))}"
    if point.before:
        words += f" ({100 * by / point.before:+.2f} %)"
    if point.unknown:
        words += f", by it or the {point.unknown} before it"
    if point.torch is not None:
        words += f", torch {point.torch[0]} → {point.torch[1]}"
    return "; ".join([words, *(line.words for line in point.lines[:lines])])


def summary(history: History, found: list[Series]) -> list[str]:
    """Returns sentences on the whole: how many commits, which metrics moved where."""
    steps = sum(len(one.steps) for one in found)
    still = sum(one.exact and not one.steps for one in found)
    words = f"{show_count(len(history.entries), 'commit')}, {len(found)} series: {show_count(steps, 'step')}"
    return [f"{words}; {still} series did not move", *([history.note] if history.note else [])]


def print_text(
    history: History, found: list[Series], console: Console, steps_only: bool, chosen: Sequence[str] | None = None
) -> None:
    """Prints a table per series that moved or failed; the others are a line each."""
    for one in found:
        if words := unmoved(one):
            console.print(printable(f"{title(one)}: {words}"), markup=False, highlight=False, soft_wrap=True)
            continue
        console.print(printable(title(one)), style="bold", markup=False, highlight=False, soft_wrap=True)
        console.print(Grid(HEADER, rows(one, steps_only, lines=0), [*HEADER[:3], "step"], ("date", "subject"), chosen))
        for point in one.steps:
            for line in point.lines:
                words = f"  {point.entry.commit.short}  {line.words}"
                console.print(printable(words), markup=False, highlight=False, soft_wrap=True)
        if not one.exact:
            console.print(f"  {INEXACT}", highlight=False)
    for words in summary(history, found):
        console.print(printable(words), markup=False, highlight=False, soft_wrap=True)


def markdown_table(header: list[str], lines: Iterable[list[str]]) -> str:
    """Formats a pipe table; rows with a step, the last column, are bold in their value and step."""

    def cell(text: str) -> str:
        return printable(text).replace("|", "\\|").replace("<", "&lt;")

    rulers = ["--:" if name == "value" else "---" for name in header]
    shown = ["| " + " | ".join(header) + " |", "| " + " | ".join(rulers) + " |"]
    for row in lines:
        words = [cell(text) for text in row]
        if row[-1] and header == HEADER:
            words[-2:] = [f"**{text}**" for text in words[-2:]]
        shown.append("| " + " | ".join(words) + " |")
    return "\n".join(shown) + "\n"


def records(found: list[Series]) -> list[dict[str, Any]]:
    """Returns a row per series and entry, for CSV."""
    return [
        {
            "metric": one.metric,
            "cell": one.cell,
            "commit": point.entry.commit.hash,
            "date": point.entry.commit.date,
            "subject": point.entry.commit.subject,
            "not_measured_before": point.gap if number else None,
            "status": point.status,
            "value": point.value,
            "step": point.difference,
            "line": point.lines[0].source if point.lines else "",
        }
        for one in found
        for number, point in enumerate(one.points)
    ]


def as_csv(found: list[Series]) -> str:
    """Formats the rows of `records`."""
    lines = records(found)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]) if lines else ["metric"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def as_json(history: History, found: list[Series]) -> str:
    """Formats the same as JSON, a list of points per series, with the steps' lines of code."""
    series = [
        {
            "metric": one.metric,
            "cell": one.cell,
            "exact": one.exact,
            "points": [
                {name: value for name, value in row.items() if name not in ("metric", "cell", "line")}
                | {"reason": point.reason, "lines": [line.words for line in point.lines]}
                for row, point in zip(records([one]), one.points, strict=True)
            ],
        }
        for one in found
    ]
    return json.dumps({"note": history.note, "series": series}, indent=1) + "\n"
